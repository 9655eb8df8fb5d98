"""`lazyllm serve`: OpenAI's interface over HTTP, with a setting for each request and figures of its effect."""
