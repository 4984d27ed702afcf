"""Moments as this API writes them. Decides only."""


def rfc3339(unix_seconds: float) -> str:
    """`2025-02-19T00:00:00Z`. From 1970 on."""
    days, seconds = divmod(max(0, int(unix_seconds)), 86_400)
    # Years that begin in March have their leap day at the end, so that months have a regular length.
    era, day = divmod(days + 719_468, 146_097)
    year_of_era = (day - day // 1460 + day // 36_524 - day // 146_096) // 365
    day_of_year = day - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    month_from_march = (5 * day_of_year + 2) // 153
    month = month_from_march + 3 if month_from_march < 10 else month_from_march - 9
    year = 400 * era + year_of_era + (1 if month <= 2 else 0)
    day_of_month = day_of_year - (153 * month_from_march + 2) // 5 + 1
    hour, rest = divmod(seconds, 3600)
    minute, second = divmod(rest, 60)
    return f"{year:04d}-{month:02d}-{day_of_month:02d}T{hour:02d}:{minute:02d}:{second:02d}Z"
