"""The server of the page: its routes, its files, and how it is run until it is stopped."""

import mimetypes
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from agentgym.view.answers import Refused, answer, refusal
from agentgym.view.api import Api, metric_names
from agentgym.view.guard import Guard
from agentgym.view.runs import Runs
from agentgym.view.search.indexing import Indexing

KINDS = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
"""The types of the page's files, which are not left to the machine's tables."""


def application(runs: Runs, indexing: Indexing, *, token: str | None, hosts: frozenset[str] | None) -> ASGIApp:
    """The server as an ASGI application, behind its guard."""
    api = Api(runs, indexing)
    routes = [
        Route("/api/runs", _answering(lambda request: api.all_runs())),
        Route("/api/metrics-names", _answering(lambda request: metric_names())),
        Route("/api/runs/{run}", _answering(lambda request: _of_run(api, request))),
        Route("/api/runs/{run}/rollouts/{number}", _answering(lambda request: _of_rollout(api, request))),
        Route("/api/runs/{run}/rollouts/{number}/{what}", _answering(lambda request: _of_rollout(api, request))),
        Route("/api/runs/{run}/{what}", _answering(lambda request: _of_run(api, request))),
        Route("/api/{rest:path}", _answering(_unknown)),
        Route("/{path:path}", page_file),
    ]
    return Guard(Starlette(routes=routes), token=token, hosts=hosts)


def page_file(request: Request) -> Response:
    """A file of the page; 404 for what is none, also where the path leads out of the folder."""
    parts = (request.path_params["path"] or "index.html").split("/")
    if any(part in ("", ".", "..") or part.startswith(".") or "\\" in part or "\0" in part for part in parts):
        return _missing()
    file = files("agentgym.view").joinpath("page", *parts)
    if not file.is_file():
        return _missing()
    ending = "." + parts[-1].rpartition(".")[2]
    kind = KINDS.get(ending) or mimetypes.guess_type(parts[-1])[0] or "application/octet-stream"
    return Response(file.read_bytes(), media_type=kind, headers={"Cache-Control": "no-cache"})


def _missing() -> Response:
    return PlainTextResponse("There is no such page; open / for the list of runs.\n", 404)


def _answering(give: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """A route that gives JSON, in a thread: the event loop waits for no disk."""

    def respond(request: Request) -> Response:
        try:
            return answer(give(request))
        except Refused as error:
            return refusal(error)

    return respond


def _of_run(api: Api, request: Request) -> Any:
    given = request.path_params
    return api.of_run(given["run"], given.get("what", ""), request.query_params)


def _of_rollout(api: Api, request: Request) -> Any:
    given = request.path_params
    return api.of_rollout(given["run"], given["number"], given.get("what", ""), request.query_params)


def _unknown(request: Request) -> Any:
    raise Refused("there is no such address", 404)
