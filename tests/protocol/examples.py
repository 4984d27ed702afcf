"""One message of every kind, all fields set, whose bytes `golden.json` fixes.

A changed byte is a changed wire: when it is meant, raise PROTOCOL_VERSION and write the file anew with
`python -m tests.protocol.examples > tests/protocol/golden.json`, so that the change is seen in review.
"""

import json
import sys
from typing import Any, get_args

import msgspec
from msgspec import Struct

from protocol import blocks, generation, handshake, tools
from protocol.failures import Failure, FailureKind
from protocol.ids import BlockKey, Grain, Incarnation, LeaseId, ModelName, RequestId
from protocol.kv_storage import KVQuantization, KVStorage
from protocol.latency import LatencyClass
from protocol.sampling import Sampling

_REQUEST = RequestId("r-1")
_KEY = BlockKey(bytes(range(16)))
_GRAINS = (Grain(bytes(16)), Grain(bytes(range(16))))
_LEASE = LeaseId(7)
_FAILURE = Failure(kind=FailureKind.OVERLOADED, message="full", param="n", retry_after_seconds=1.5)

_CHAT = generation.ChatPrompt(
    messages=(
        generation.ChatMessage(role="system", content="brief", name="n"),
        generation.ChatMessage(
            role="assistant",
            content="",
            reasoning_content="why",
            tool_calls=(generation.ToolCall(id="c1", name="f", arguments={"city": "Oslo", "days": [1, 2.5, None]}),),
        ),
        generation.ChatMessage(role="tool", content="sunny", tool_call_id="c1"),
    ),
    tools=(tools.Tool(name="f", description="d", parameters={"type": "object", "properties": {"city": {}}}),),
    template_arguments={"enable_thinking": False},
    ending="continue",
)


def _generate(prompt: generation.Prompt, constraint: tools.Constraint | None = None) -> generation.Generate:
    return generation.Generate(
        request_id=_REQUEST,
        prompt=prompt,
        sampling=Sampling(temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, logit_bias={3: -1.0}, seed=42),
        max_tokens=5,
        stop=("end",),
        stop_token_ids=(2,),
        top_logprobs=1,
        latency_class=LatencyClass.INTERACTIVE,
        tenant="ada",
        tenant_weight=2.0,
        cache=generation.CacheUse(
            scope=b"salt", owner="0011223344556677", retention="in_memory", disk_ttl_seconds=3600.0
        ),
        tool_use=tools.ToolUse(choice="required", allowed=("f",), calls="one"),
        constraint=constraint,
        reasoning="split",
        reasoning_budget_tokens=2048,
        ignore_end="yes",
    )


_LOGPROB = generation.TokenLogprob(token="é", token_bytes=b"\xc3\xa9", logprob=-0.25)

_REPORT = generation.CacheReport(
    ram_tokens=256,
    disk_tokens=16,
    miss_reason="absent",
    restored_bytes=1000,
    restore_seconds=0.01,
    expected_restore_seconds=0.02,
    expected_compute_seconds=1.5,
)

EXAMPLES: tuple[Struct, ...] = (
    # handshake
    handshake.Hello(protocol_version=2, model=ModelName("org/m"), incarnation=Incarnation(3), pid=99),
    handshake.Welcome(),
    handshake.Refused(reason="old"),
    # gateway → worker
    _generate(_CHAT),
    _generate(generation.TextPrompt(text="once"), tools.JsonSchema(text="{}")),
    _generate(generation.TextPrompt(text="once"), tools.JsonObject()),
    _generate(generation.TextPrompt(text="once"), tools.Regex(pattern="a+")),
    _generate(generation.TextPrompt(text="once"), tools.OneOf(options=("a", "b"))),
    _generate(generation.TextPrompt(text="once"), tools.Grammar(text='start: "a"')),
    _generate(generation.TokenPrompt(token_ids=(1, 2, 70000))),
    generation.Warm(
        request_id=_REQUEST,
        prompt=generation.TextPrompt(text="once"),
        cache=generation.CacheUse(scope=b"salt", owner="ab"),
        pin=generation.Pin(name="repo", ttl_seconds=60.0),
    ),
    generation.Tokenize(request_id=_REQUEST, prompt=generation.TextPrompt(text="once"), special_tokens="leave"),
    generation.Detokenize(request_id=_REQUEST, token_ids=(1, 70000)),
    generation.Check(request_id=_REQUEST, generate=_generate(generation.TextPrompt(text="once"))),
    generation.Embed(
        request_id=_REQUEST,
        inputs=(generation.TextPrompt(text="once"), generation.TokenPrompt(token_ids=(1,))),
        dimensions=64,
        overlong="cut",
        latency_class=LatencyClass.BATCH,
        tenant="ada",
        tenant_weight=2.0,
    ),
    generation.Rerank(
        request_id=_REQUEST,
        query="q",
        documents=("a", "b"),
        overlong="cut",
        latency_class=LatencyClass.BATCH,
        tenant="ada",
        tenant_weight=2.0,
    ),
    generation.Unpin(owner="ab", name="repo"),
    generation.SetBudget(hot_cache_bytes=1000),
    generation.ForgetHot(owner="ab"),
    generation.Cancel(request_id=_REQUEST),
    generation.Drain(deadline_seconds=2.5),
    generation.Ping(nonce=1),
    # worker → gateway
    generation.TokenizerReady(),
    generation.Ready(
        context_tokens=8192,
        max_rows=16,
        weight_bytes=2**33,
        load_seconds=1.25,
        prefix_reuse=generation.PrefixReuse(available=False, reason="logits differ"),
        fingerprint="abc",
        capabilities=("chat", "tools"),
        kv=KVStorage(quantization=KVQuantization(bits=8, group_size=32), bytes_per_token=4352),
    ),
    generation.Loading(done_bytes=1, total_bytes=2),
    generation.Queued(request_id=_REQUEST, prompt_tokens=12, message_starts=(3, 8), grains=_GRAINS),
    generation.Waiting(request_id=_REQUEST, ahead=2, eta_seconds=3.5, held_by="higher_class"),
    generation.Prefilling(request_id=_REQUEST, done_tokens=256, total_tokens=1000, cached_tokens=128, eta_seconds=2.5),
    generation.Delta(
        request_id=_REQUEST,
        text="é",
        tokens=1,
        logprobs=(generation.ChosenLogprob(chosen=_LOGPROB, top=(_LOGPROB,)),),
    ),
    generation.Reasoning(
        request_id=_REQUEST,
        text="é",
        tokens=1,
        logprobs=(generation.ChosenLogprob(chosen=_LOGPROB, top=(_LOGPROB,)),),
    ),
    generation.CallStarted(request_id=_REQUEST, index=0, call_id="call_1", name="f"),
    generation.CallArguments(
        request_id=_REQUEST,
        index=0,
        text="{",
        tokens=1,
        logprobs=(generation.ChosenLogprob(chosen=_LOGPROB, top=(_LOGPROB,)),),
    ),
    generation.CallEnded(request_id=_REQUEST, index=0),
    generation.Finished(
        request_id=_REQUEST,
        reason=generation.FinishReason.STOP,
        usage=generation.Usage(prompt_tokens=12, completion_tokens=3, cached_tokens=0, reasoning_tokens=1),
        timings=generation.Timings(
            queue_seconds=0.5,
            prefill_seconds=0.25,
            decode_seconds=1.0,
            prefill_slices=2,
            held_seconds=0.5,
            held_by="rows",
            preemptions=1,
        ),
        cache=_REPORT,
        matched_stop="end",
        warnings=("tool_call_repaired",),
    ),
    generation.Warmed(
        request_id=_REQUEST,
        prompt_tokens=300,
        cached_tokens=256,
        blocks=2,
        size_bytes=9,
        durable_blocks=1,
        timings=generation.Timings(queue_seconds=0.5, prefill_seconds=0.25, decode_seconds=0.0, prefill_slices=1),
        cache=_REPORT,
    ),
    generation.Tokenized(request_id=_REQUEST, token_ids=(1, 70000), tokens=("on", "ce"), context_tokens=8192),
    generation.Detokenized(request_id=_REQUEST, text="once"),
    generation.Checked(request_id=_REQUEST, prompt_tokens=3),
    generation.Embedded(
        request_id=_REQUEST,
        dimensions=1,
        vectors=b"\x00\x00\x80?",
        prompt_tokens=3,
        timings=generation.Timings(
            queue_seconds=0.5, prefill_seconds=0.25, decode_seconds=0.0, prefill_slices=1, held={"other_model": 0.5}
        ),
    ),
    generation.Reranked(request_id=_REQUEST, scores=(0.5, 0.25), prompt_tokens=3),
    generation.Failed(request_id=_REQUEST, failure=_FAILURE),
    generation.Pong(
        nonce=1,
        steps=10,
        running_rows=2,
        waiting_requests=3,
        active_bytes=4,
        hot_cache_bytes=5,
        hot_cache_blocks=6,
        hot_cache_budget_bytes=7,
        prefill_tokens_per_second=100.5,
        read_bytes_per_second=1e9,
        misses={"absent": 1},
        not_written={"disk_slower": 2},
        pins=(generation.PinnedPrefix(owner="ab", name="repo", tokens=300, size_bytes=9, expires_seconds=60.0),),
        live_kv_bytes=8,
        live_kv_budget_bytes=9,
        preemptions=1,
    ),
    generation.LastWords(failure=_FAILURE),
    # worker → cachestore
    blocks.Lookup(call_id=1, fingerprint="abc", grains=_GRAINS, skip_blocks=1, parts=4),
    blocks.Fetch(call_id=1, fingerprint="abc", grains=_GRAINS, skip_blocks=1, parts=4, most_blocks=8),
    blocks.Stage(call_id=1, fingerprint="abc", key=_KEY, file_bytes=4096, owner="ab", ttl_seconds=3600.0),
    blocks.Publish(call_id=1, lease=_LEASE, parent=BlockKey(b""), grains=_GRAINS, supersedes=_KEY),
    blocks.Release(call_id=1, lease=_LEASE, verified=(_KEY,), suspect=(_KEY,)),
    blocks.Forget(call_id=1, fingerprint="abc", owner="ab", unused_for_seconds=60.0, asked_by="cli"),
    blocks.PinBlocks(call_id=1, fingerprint="abc", keys=(_KEY,), owner="ab", name="repo", ttl_seconds=60.0),
    blocks.UnpinBlocks(call_id=1, owner="ab", name="repo"),
    blocks.Describe(call_id=1),
    # cachestore → worker
    blocks.Found(call_id=1, blocks=(blocks.FoundBlock(key=_KEY, grains=2, file_bytes=4096),)),
    blocks.Leased(
        call_id=1,
        lease=_LEASE,
        blocks=(blocks.LeasedBlock(key=_KEY, grains=2, path="a/b", checksum=_KEY),),
        miss_reason="integrity",
    ),
    blocks.Staged(call_id=1, lease=_LEASE, path="a/b"),
    blocks.Declined(call_id=1, reason="quota"),
    blocks.Published(call_id=1, file_bytes=4096),
    blocks.Released(call_id=1),
    blocks.Forgotten(call_id=1, blocks=2, file_bytes=8192),
    blocks.Pinned(call_id=1, blocks=2),
    blocks.Unpinned(call_id=1, blocks=2),
    blocks.StillHeld(),
    blocks.Described(
        call_id=1,
        blocks=1,
        file_bytes=2,
        quota_bytes=3,
        leases=4,
        published=5,
        written_bytes=6,
        evicted=7,
        quarantined=8,
        written_today_bytes=9,
        daily_write_bytes=10,
        write_state="yellow",
        expired=11,
        pins=(blocks.PinBooks(owner="ab", name="repo", blocks=2, file_bytes=9, expires_unix=1e9),),
    ),
    blocks.CacheFailed(call_id=1, failure=_FAILURE),
)

DIRECTIONS: dict[str, Any] = {
    "gateway to worker": generation.WorkerCommand,
    "worker to gateway": generation.WorkerEvent,
    "to cachestore": blocks.BlockRequest,
    "from cachestore": blocks.BlockReply,
}
"""What one decoder reads, by direction."""


def name_of(example: Struct) -> str:
    """The example's place in the golden file."""
    kind = type(example).__name__
    if not isinstance(example, generation.Generate):
        return kind
    parts = [example.prompt, *([] if example.constraint is None else [example.constraint])]
    return f"{kind}({', '.join(type(part).__name__ for part in parts)})"


def reader_of(example: Struct) -> Any:
    """The direction in which this message travels."""
    return next(union for union in DIRECTIONS.values() if type(example) in get_args(union))


def golden() -> dict[str, dict[str, Any]]:
    """Each example's bytes, and what they say for those who read no hexadecimal."""
    encoded = {name_of(example): msgspec.msgpack.encode(example) for example in EXAMPLES}
    return {
        name: {"says": msgspec.json.decode(msgspec.json.encode(msgspec.msgpack.decode(data))), "bytes": data.hex()}
        for name, data in encoded.items()
    }


if __name__ == "__main__":
    json.dump(golden(), sys.stdout, indent=1, ensure_ascii=False)
    sys.stdout.write("\n")
