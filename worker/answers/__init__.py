"""What a model wrote → what it meant: reasoning, text and calls of tools."""
