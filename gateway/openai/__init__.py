"""The OpenAI dialect: schema, render, routes."""
