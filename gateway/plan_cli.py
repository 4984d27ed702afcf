"""`mlxd plan`: which models fit into memory together, and which would have to leave for which."""

from typing import Annotated, assert_never

import msgspec
import typer
from rich.text import Text

from gateway.cli_output import ConfigOption, HomeOption, console, settings_of, size_text, table
from gateway.control import ControlError, ask_service, read_admin_token
from gateway.durations import duration_text
from gateway.memory_plan import MemoryPlan, PlannedModel


def show_plan(
    config: ConfigOption = None,
    home: HomeOption = None,
    *,
    json: Annotated[bool, typer.Option("--json", help="Print the whole answer as JSON.")] = False,
) -> None:
    """Which models have memory, which fit beside them, and which never will."""
    settings = settings_of(config, home)
    answer = ask_service(settings, "GET", "/admin/plan", token=read_admin_token(settings))
    if answer.status != 200:
        raise ControlError(f"the service answered {answer.status} to the question for its plan")
    plan = msgspec.json.decode(answer.body, type=MemoryPlan)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(plan), indent=2).decode())
        return
    limit = "no limit" if plan.limit_bytes is None else size_text(plan.limit_bytes)
    console().print(f"memory for models: {limit}, {size_text(plan.reserved_bytes)} of it reserved")
    rows = table("model", "needs", "weights", "prefixes", "live KV", "scratch", "holds", "now")
    for model in plan.models:
        rows.add_row(
            Text(model.id),
            size_text(model.need_bytes),
            size_text(model.weight_bytes),
            size_text(model.hot_cache_bytes),
            size_text(model.live_kv_bytes),
            size_text(model.working_bytes),
            "-" if model.memory_bytes is None else size_text(model.memory_bytes),
            Text(_now(model)),
        )
    console().print(rows)


def _now(model: PlannedModel) -> str:
    match model.verdict:
        case "has_memory":
            idle = "works" if model.idle_seconds is None else f"idle for {duration_text(model.idle_seconds)}"
            return f"loaded, {idle}{', pinned' if model.pinned else ''}"
        case "fits":
            return "fits"
        case "fits_after":
            return f"fits when {', '.join(model.after)} has left"
        case "never_fits":
            return "never fits: raise [memory] limit, lower hot_cache or live_kv, or take a smaller quantization"
        case _:
            assert_never(model.verdict)
