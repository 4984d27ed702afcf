"""A worker as the board and the lease see it: does what its standard input says, a word a line, and answers each."""

import os
import sys
import time
from pathlib import Path

from protocol.ids import Incarnation
from worker.board import Board
from worker.neighbours import Activity
from worker.prefill_lease import PrefillLease


def say(word: object) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main() -> None:
    runtime_directory, incarnation = Path(sys.argv[1]), Incarnation(int(sys.argv[2]))
    board = Board(runtime_directory, incarnation, clock=time.monotonic)
    lease = PrefillLease(runtime_directory)
    say("there")
    for line in sys.stdin:
        match line.split():
            case ["publish", steps]:
                board.publish(Activity(active_rank=0, decode_steps=int(steps)))
                say("published")
            case ["storm"]:
                # Every field of a word is the same number, so that a mixed one can be told.
                say("storming")
                steps = 0
                while True:
                    steps += 1
                    board.publish(Activity(decode_steps=steps, slices=steps, step_seconds=steps, prefill_since=steps))
            case ["take"]:
                say(lease.try_take())
            case ["release"]:
                lease.release()
                say("released")
            case ["fork"]:
                # A child without exec inherits the locks, as one of a library's might.
                if (child := os.fork()) == 0:
                    time.sleep(600)
                    os._exit(0)
                say(child)
            case ["leave"]:
                board.close()
                lease.close()
                say("left")
            case _:
                raise SystemExit(f"what is {line!r}?")


if __name__ == "__main__":
    main()
