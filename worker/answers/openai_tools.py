"""A tool as chat templates and mlx-lm's parsers know it. Pure."""

from typing import Any

from protocol.tools import Tool


def openai_tool(tool: Tool) -> dict[str, Any]:
    """Its keys always in this order: a prefix is only the same if its bytes are."""
    parameters: dict[str, Any] = (
        tool.parameters if tool.parameters is not None else {"type": "object", "properties": {}}
    )
    function: dict[str, Any] = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}
