"""The routes of the page's server and the files that it serves."""

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from agentgym.files.foreign.opening import UnreadableFileError
from agentgym.view.answers import Refused, answer, refusal
from agentgym.view.api import Api, metric_names
from agentgym.view.guard import Guard
from agentgym.view.runs import Runs
from agentgym.view.search.indexing import Indexing

log = logging.getLogger(__name__)

PAGE = Path(__file__).parent / "page"
"""Folder of the files that the browser loads."""
KINDS = {
    ".js": "text/javascript",
    ".css": "text/css",
    ".html": "text/html",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
"""Media types of the page's files, fixed here because the machine's own tables vary."""


def application(
    runs: Runs, indexing: Indexing, *, token: str | None, hosts: frozenset[str], numbers: bool = False
) -> ASGIApp:
    """Return the server as an ASGI application, wrapped in a guard that decides which requests are accepted.

    Args:
        runs: The runs to show.
        indexing: The search indexes of the runs.
        token: As in `Guard`.
        hosts: As in `Guard`.
        numbers: As in `Guard`.
    """
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
    return Guard(Starlette(routes=routes), token=token, hosts=hosts, numbers=numbers)


def page_file(request: Request) -> Response:
    """Return a file of the page, or a 404 response if the path doesn't name one."""
    name = request.path_params["path"] or "index.html"
    if (file := page_files().get(name)) is None:
        return _missing()
    return Response(file.read_bytes(), media_type=KINDS[file.suffix], headers={"Cache-Control": "no-cache"})


@cache
def page_files() -> dict[str, Path]:
    """Return the files of the page by their relative paths, which are searched for only once."""
    found = (path for path in PAGE.rglob("*") if path.suffix in KINDS and path.is_file())
    return {path.relative_to(PAGE).as_posix(): path for path in found}


def _missing() -> Response:
    return PlainTextResponse("There is no such page; open / for the list of runs.\n", 404)


def _answering(give: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """Return a route that responds with JSON: what `give` returns for a request, or an error message.

    Since the route isn't a coroutine, Starlette runs it in a thread, and the event loop never waits for the disk.
    """

    def respond(request: Request) -> Response:
        try:
            return answer(give(request))
        except Refused as error:
            return refusal(error)
        except UnreadableFileError as error:
            return refusal(Refused(str(error), 409))
        except OSError as error:
            return refusal(Refused(f"{error.filename}: cannot be read ({error.strerror})", 409))
        except Exception as error:
            log.exception("%s", request.url.path)
            said = f"the viewer failed ({type(error).__name__}: {error}); its terminal has the traceback"
            return refusal(Refused(said, 500))

    return respond


def _of_run(api: Api, request: Request) -> Any:
    given = request.path_params
    return api.of_run(given["run"], given.get("what", ""), request.query_params)


def _of_rollout(api: Api, request: Request) -> Any:
    given = request.path_params
    return api.of_rollout(given["run"], given["number"], given.get("what", ""), request.query_params)


def _unknown(request: Request) -> Any:
    raise Refused("there is no such URL", 404)
