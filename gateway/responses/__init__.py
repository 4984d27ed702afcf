"""OpenAI Responses: schema, translation, rendering, stored answers, routes."""
