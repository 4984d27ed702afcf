"""`mlxd demo`: a real model, served and asked through the openai SDK; restarted; and one of two killed.

Three acts, each with a claim that is checked; the exit code is 0 only if all hold.

1. A chat answer streams.
2. A prefix of about 2,000 tokens is computed once: asked cold, again with another question (from RAM), and once more
   after the *whole* service was restarted (from disk).
3. Two models stream and one of their processes is killed with SIGKILL: the other's stream is what it would have been,
   the victim's client gets an error, and the victim is back by itself.
"""

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import psutil
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from gateway.config import load_settings
from gateway.control import ControlError, open_port
from gateway.demo_service import DemoFailed, DemoService, end_leftover, wait_until

if TYPE_CHECKING:
    from openai import OpenAI

Mode = Literal["keep", "remove"]
"""Whether the service goes on afterwards. The model folder always stays, so a second demo starts at once."""

MODEL = "SmolLM2-135M-Instruct"
TWIN = f"{MODEL}-twin"
PORT = 8321
PREFIX_SHARE = 0.9
"""How much of the long prefix must come from the cache."""

VICTIM_ERROR_SECONDS = 2.0
_RELOAD_SECONDS = 120.0
_STORED_SECONDS = 30.0
_STREAM_TOKENS = 48
_QUESTIONS = (
    "Which lamp is mentioned first?",
    "How many lamps are there?",
    "What does the keeper do at dawn?",
)

console = Console(highlight=False)


@dataclass
class Stream:
    """One answer as it came. Times are seconds since it was asked."""

    text: str = ""
    first_text_seconds: float | None = None
    arrivals: list[float] = field(default_factory=list[float])
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None
    ended_at: float = 0.0

    @property
    def longest_gap_seconds(self) -> float:
        return max((b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)), default=0.0)


def main(home: Path, mode: Mode) -> int:
    """Run all of it, with the model in `home/models` and the service beside it. Gives the exit code."""
    try:
        from openai import OpenAI
    except ImportError:
        console.print("mlxd demo asks through the openai SDK: pip install 'mlxd[demo]', or run `make demo`")
        return 1
    try:
        service = _prepare(home)
        try:
            service.start()
            client = OpenAI(base_url=service.base_url, api_key="none-needed-on-loopback", max_retries=0, timeout=600)
            _load(service, client, MODEL)
            _act_one(client)
            _act_two(service, client)
            _act_three(service, client)
        except BaseException:
            service.stop()
            raise
        if mode == "remove":
            service.stop()
    except (DemoFailed, ControlError) as why:
        console.print(f"\n[bold red]The demo failed:[/] {why}")
        return 1
    except KeyboardInterrupt:
        console.print("\nstopped")
        return 130
    _farewell(service, mode)
    return 0


# --- before --------------------------------------------------------------------------------------------------------


def _prepare(users_home: Path) -> DemoService:
    """The model folder, built once, where `mlxd serve` finds it, too; and a home of the demo's own, with an empty
    cache: cold must be cold, and the user's service is nobody's to restart."""
    users_home.mkdir(parents=True, exist_ok=True, mode=0o700)
    model = users_home / "models" / MODEL
    model.parent.mkdir(exist_ok=True)
    home = users_home / "demo"
    models = home / "models"
    models.mkdir(parents=True, exist_ok=True, mode=0o700)
    end_leftover(load_settings(None, home=home))
    _build_model(model)
    for name in (MODEL, TWIN):
        link = models / name
        if not link.is_symlink():
            link.symlink_to(model, target_is_directory=True)
    service = DemoService(home, _free_port())
    shutil.rmtree(service.settings.cache.directory, ignore_errors=True)
    service.log_path.unlink(missing_ok=True)
    return service


def _free_port() -> int:
    try:
        open_port("127.0.0.1", PORT).close()
    except ControlError:
        return 0
    return PORT


def _build_model(destination: Path) -> None:
    """Run the builder as a child, since it needs MLX and this process stays without it."""
    command = [sys.executable, "-P", "-m", "worker.demo_model", str(destination)]
    bars = Progress(
        TextColumn("{task.description:<28}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
    )
    with bars, subprocess.Popen(command, stdout=subprocess.PIPE) as builder:
        tasks: dict[str, Any] = {}
        result: dict[str, Any] = {}
        for line in builder.stdout or ():
            result = msgspec.json.decode(line, type=dict[str, Any])
            match result:
                case {"type": "Downloading", "done_bytes": done, "total_bytes": total}:
                    _advance(bars, tasks, f"download, {total / 1e6:.0f} MB", done, total)
                case {"type": "Converting", "done_tensors": done, "total_tensors": total}:
                    _advance(bars, tasks, "convert the weights", done, total)
                case {"type": "Checking"}:
                    _advance(bars, tasks, "ask it what it knows", 0, 1)
                case _:
                    pass
        for task in bars.tasks:
            bars.update(task.id, completed=task.total)
    if result.get("type") != "Built":
        raise DemoFailed(str(result.get("reason", f"the model could not be built (exit code {builder.returncode})")))


def _advance(bars: Progress, tasks: dict[str, Any], name: str, done: int, total: int) -> None:
    if name not in tasks:
        tasks[name] = bars.add_task(name, total=total)
    bars.update(tasks[name], completed=done)


def _load(service: DemoService, client: "OpenAI", name: str) -> None:
    """Wake the model with a one-token request, and show how far its weights are."""
    bars = Progress(TextColumn("{task.description:<28}"), BarColumn(), DownloadColumn())
    answer = Stream()

    def ask() -> None:
        _ask_into(answer, client, name, "hi", max_tokens=1)

    asking = threading.Thread(target=ask, daemon=True)
    with bars:
        task = bars.add_task(f"load {name}", total=None)
        asking.start()
        while asking.is_alive():
            process = service.model(name)
            if process is not None and process.loading is not None:
                bars.update(task, completed=process.loading.done_bytes, total=process.loading.total_bytes)
            asking.join(0.1)
        process = service.model(name)
        if process is not None and process.limits is not None:
            bars.update(task, completed=process.limits.weight_bytes, total=process.limits.weight_bytes)
    if answer.error is not None:
        raise DemoFailed(f"the first request to {name} failed: {answer.error}\n{service.last_lines()}")


# --- the acts ------------------------------------------------------------------------------------------------------


def _act_one(client: "OpenAI") -> None:
    console.print("\n[bold]1. A chat answer, streamed[/]")
    question = "What is the capital of France, and what is it known for?"
    console.print(f"   [dim]{question}[/]\n   ", end="")
    answer = _ask(client, MODEL, question, max_tokens=60, show=lambda text: console.print(text, end="", markup=False))
    console.print()
    _expect(answer.error is None and "Paris" in answer.text, f"expected an answer that names Paris, got {answer}")


def _act_two(service: DemoService, client: "OpenAI") -> None:
    console.print("\n[bold]2. A prefix of about 2,000 tokens, computed once[/]")
    prefix = _long_prefix()
    asked = [("cold", _ask(client, MODEL, f"{prefix}\n\n{_QUESTIONS[0]}", max_tokens=16))]
    prefix_tokens = asked[0][1].prompt_tokens - 16  # the question and the template's end, roughly
    asked.append(("other question, from RAM", _ask(client, MODEL, f"{prefix}\n\n{_QUESTIONS[1]}", max_tokens=16)))
    with console.status("   restarting the whole service"):
        service.stop()
        service.start()
        # The model is loaded by a short question, so that the time below is the cache's and not the loader's.
        _expect(_ask(client, MODEL, "hi", max_tokens=1).error is None, "the restarted service did not answer")
    asked.append(("service restarted, from disk", _ask(client, MODEL, f"{prefix}\n\n{_QUESTIONS[2]}", max_tokens=16)))

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("")
    for name in ("time to first token", "prompt tokens", "from the cache"):
        table.add_column(name, justify="right")
    for name, answer in asked:
        table.add_row(
            f"   {name}", _seconds(answer.first_text_seconds), str(answer.prompt_tokens), str(answer.cached_tokens)
        )
    console.print(table)
    for name, answer in asked:
        _expect(answer.error is None and answer.first_text_seconds is not None, f"{name}: no answer ({answer.error})")
    cold = asked[0][1].first_text_seconds or 0.0
    for name, answer in asked[1:]:
        enough = int(PREFIX_SHARE * prefix_tokens)
        _expect(answer.cached_tokens >= enough, f"{name}: {answer.cached_tokens} tokens from the cache, not {enough}")
        _expect((answer.first_text_seconds or cold) < cold, f"{name}: it was not faster than cold")


def _act_three(service: DemoService, client: "OpenAI") -> None:
    console.print("\n[bold]3. Two models stream, and the process of one is killed[/]")
    question = "Tell me a story about a fox."
    _load(service, client, TWIN)
    undisturbed = _ask(client, MODEL, question, max_tokens=_STREAM_TOKENS)
    victim_process = service.model(TWIN)
    _expect(victim_process is not None and victim_process.pid is not None, f"{TWIN} has no process")
    pid = victim_process.pid if victim_process and victim_process.pid else 0

    streams = {MODEL: Stream(), TWIN: Stream()}
    threads = [
        threading.Thread(
            target=_ask_into,
            args=(stream, client, name, question, 4 * _STREAM_TOKENS if name == TWIN else _STREAM_TOKENS),
        )
        for name, stream in streams.items()
    ]
    for thread in threads:
        thread.start()
    victim, survivor = streams[TWIN], streams[MODEL]
    wait_until(lambda: len(victim.arrivals) > 3 and len(survivor.arrivals) > 3, 60, "the two did not stream", service)
    psutil.Process(pid).kill()
    killed_at = time.monotonic()
    with console.status(f"   kill -9 {pid}"):
        threads[1].join()  # the victim's client has its error
        back = _ask(client, TWIN, "What is the capital of France?", max_tokens=8)
        back_seconds = time.monotonic() - killed_at
        threads[0].join()
    after = service.model(TWIN)
    restarts = after.restarts if after else 0

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_header=False)
    same = "the same text as undisturbed" if survivor.text == undisturbed.text else "NOT the text it gives undisturbed"
    table.add_row(
        f"   {MODEL} (survivor)",
        f"{len(survivor.arrivals)} pieces, longest gap {_seconds(survivor.longest_gap_seconds)}, {same}",
    )
    table.add_row(
        f"   {TWIN} (killed)", f"its client heard after {_seconds(victim.ended_at - killed_at)}: {victim.error}"
    )
    table.add_row("", f"answers again {_seconds(back_seconds)} after the kill, restarts: {restarts}")
    console.print(table)
    _expect(survivor.error is None and survivor.text == undisturbed.text, "the survivor's stream was disturbed")
    _expect(victim.error is not None, "the victim's client got no error")
    _expect(victim.ended_at - killed_at <= VICTIM_ERROR_SECONDS, "the victim's client heard too late")
    _expect(back.error is None and "Paris" in back.text, f"the victim did not come back: {back.error or back.text}")
    _expect(restarts == 1, f"expected one restart, saw {restarts}")


def _farewell(service: DemoService, mode: Mode) -> None:
    console.print("\n[bold green]Every claim held.[/]")
    url = f"http://127.0.0.1:{PORT}/v1"
    if mode == "keep":
        url = service.base_url
        console.print(
            f"It goes on at [bold]{url}[/] (process {service.address.pid}, log {service.log_path}); stop it with kill."
        )
    else:
        console.print(
            f"To go on:  mlxd serve   (it serves this model, and every folder that you put beside it in "
            f"{service.home.parent / 'models'})",
            soft_wrap=True,
        )
    console.print(
        f"""
  curl {url}/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}", api_key="none")
  print(client.chat.completions.create(model="{MODEL}", messages=[{{"role": "user", "content": "Hello!"}}]))
""",
        markup=False,
        soft_wrap=True,
    )


# --- small things --------------------------------------------------------------------------------------------------


def _ask(
    client: "OpenAI", model: str, question: str, *, max_tokens: int, show: Callable[[str], None] | None = None
) -> Stream:
    stream = Stream()
    _ask_into(stream, client, model, question, max_tokens, show)
    return stream


def _ask_into(
    stream: Stream,
    client: "OpenAI",
    model: str,
    question: str,
    max_tokens: int,
    show: Callable[[str], None] | None = None,
) -> None:
    """Greedy, streamed. What goes wrong stands in `stream.error` as the SDK raised it."""
    import openai

    started = time.monotonic()
    try:
        for chunk in client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=max_tokens,
            stream=True,
            stream_options={"include_usage": True},
        ):
            if chunk.choices and (text := chunk.choices[0].delta.content):
                stream.arrivals.append(time.monotonic() - started)
                stream.first_text_seconds = stream.first_text_seconds or stream.arrivals[-1]
                stream.text += text
                if show:
                    show(text)
            if chunk.usage:
                stream.prompt_tokens = chunk.usage.prompt_tokens
                details = chunk.usage.prompt_tokens_details
                stream.cached_tokens = (details.cached_tokens if details else 0) or 0
    except openai.APIError as why:
        stream.error = why.message
    stream.ended_at = time.monotonic()


def _long_prefix() -> str:
    """Some 2,000 tokens in which no part repeats another."""
    colours = ("red", "green", "blue", "amber", "white", "violet", "grey")
    places = ("the stairs", "the north window", "the well", "the boathouse", "the long pier", "the chapel")
    lines = [
        f"Lamp {n} is {colours[n * 5 % 7]}; it hangs over {places[n * 7 % 6]} and burns {n * 13 % 59} hours."
        for n in range(1, 93)
    ]
    return "The keeper's book of lamps.\n" + "\n".join(lines) + "\nAt dawn the keeper puts out every lamp in turn."


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _expect(holds: object, otherwise: str) -> None:
    if not holds:
        raise DemoFailed(otherwise)
