"""An env's tools as an MCP server: `open_episode` creates it, `serve_stdio` and `serve_http` run it."""

from agentgym.errors.extras import needs_extra

with needs_extra():
    import mcp  # noqa: F401

    from agentgym.bridges.mcp_server.episode import OUTCOME, TASK, EpisodeServer, open_episode
    from agentgym.bridges.mcp_server.transports import PATH, serve_http, serve_stdio

__all__ = ["OUTCOME", "PATH", "TASK", "EpisodeServer", "open_episode", "serve_http", "serve_stdio"]
