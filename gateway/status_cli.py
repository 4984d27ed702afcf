"""`mlxd status`: what the running service does, for eyes and for scripts."""

from rich.text import Text

from gateway.cli_output import (
    ConfigOption,
    HomeOption,
    JsonOption,
    console,
    print_json,
    settings_of,
    size_text,
    table,
)
from gateway.control import announced_service, fetch_status, service_url
from gateway.durations import duration_text
from gateway.status import AdminModel, AdminStatus, LastExit
from gateway.status_report import status_report


def show_status(config: ConfigOption = None, home: HomeOption = None, *, json: JsonOption = False) -> None:
    """What the running service does now."""
    settings = settings_of(config, home)
    answer = fetch_status(settings)
    url = service_url(settings, announced_service(settings))
    if json:
        print_json(status_report(answer, url=url))
    else:
        _print_status(answer, url)


def _print_status(answer: AdminStatus, url: str) -> None:
    out = console()
    gateway = answer.gateway
    out.print(f"mlxd {gateway.version} at {url}, process {gateway.pid}, up {duration_text(gateway.uptime_seconds)}")
    rows = table("model", "state", "pid", "open", "waiting", "steps", "restarts", "memory", "remark")
    for model in answer.models:
        rows.add_row(*_model_row(model))
    out.print(rows)
    for model in answer.models:
        for line in _last_lines(model):
            out.print(Text(f"  {model.name}: {line}"))
    store = answer.cachestore
    if store is None:
        out.print("cache on disk: off")
    elif store.books is None:
        out.print(Text(f"cache on disk: {store.state}{_last_exit(store.last_exit)}"))
    else:
        books = store.books
        out.print(
            f"cache on disk: {store.state}, {books.blocks} blocks, "
            f"{size_text(books.file_bytes)} of {size_text(books.quota_bytes)}, "
            f"{size_text(books.written_bytes)} written, {books.evicted} evicted, {books.quarantined} quarantined"
        )


def _model_row(model: AdminModel) -> tuple[Text | str, ...]:
    process = model.process
    if process is None:
        return (Text(model.name), "absent", "-", "0", "0", "0", "0", "-", Text(model.problem or "-"))
    if process.loading is not None:
        done = 100 * process.loading.done_bytes // max(1, process.loading.total_bytes)
        loading = f"{done} % of {size_text(process.loading.total_bytes)} loaded"
    else:
        loading = ""
    reason = process.stuck_reason or process.held_reason
    remark = model.problem or reason or loading or _last_exit(process.last_exit).removeprefix(", ") or "-"
    return (
        Text(model.name),
        process.state,
        "-" if process.pid is None else str(process.pid),
        str(process.open_requests),
        str(process.waiting_requests),
        str(process.steps),
        str(process.restarts),
        "-" if process.memory_bytes is None else size_text(process.memory_bytes),
        Text(remark),
    )


def _last_lines(model: AdminModel) -> tuple[str, ...]:
    """What a process that ended badly wrote last."""
    last = model.process.last_exit if model.process else None
    return last.stderr_tail[-5:] if last is not None and last.exit_code != 0 else ()


def _last_exit(last: LastExit | None) -> str:
    return "" if last is None else f", last exit: {last.reason}"
