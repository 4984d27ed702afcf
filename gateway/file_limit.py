"""How many files and connections this process may have open."""

import resource

_WANTED = (65536, 10240)


def raise_file_limit() -> None:
    """Lift the soft limit: launchd gives 256. The children inherit it. Some systems refuse the larger number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in _WANTED:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft == resource.RLIM_INFINITY or soft >= limit:
            return
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        except (ValueError, OSError):
            continue
        return
