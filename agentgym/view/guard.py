"""Middleware that decides which requests are accepted, and limits what a browser may do with the responses."""

import hashlib
import secrets
from ipaddress import ip_address
from urllib.parse import parse_qsl, urlencode

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "agentgym-view"
"""Prefix of the name of the cookie that holds the token.

The server's port is appended, because a browser sends a cookie to all ports of a host.
"""
LOCAL = ("127.0.0.1", "localhost", "[::1]")
"""Host names of the local machine."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}


class Guard:
    """Accepts GET and HEAD requests that name this server as their host and carry its token, and refuses all others.

    With a token, every URL and the cookie are below a separate path. Browsers send cookies to every port of a
    machine, so without this path any other server on the machine would receive the token.

    Args:
        app: The application to protect.
        token: The token that requests must carry; None accepts requests without one.
        hosts: The accepted host names, without a port.
        numbers: Whether any IP address is accepted as the host, too. That is safe: another site that directs its name
            to this machine still sends its name as the host, not an IP address.
    """

    def __init__(self, app: ASGIApp, *, token: str | None, hosts: frozenset[str], numbers: bool = False) -> None:
        self.app, self.token, self.hosts, self.numbers = app, token, hosts, numbers
        self.place = "" if token is None else f"/{hashlib.sha256(token.encode()).hexdigest()[:16]}"
        """Path prefix of all URLs of this server."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        refused = self._refusal(request)
        app: ASGIApp = self.app if refused is None else refused
        await app({**scope, "root_path": self.place}, receive, _with_headers(send))

    def _refusal(self, request: Request) -> Response | None:
        if not self._is_host(request.headers.get("host", "")):
            return _no("This server does not accept that host name; open the address that it printed.")
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("Only GET and HEAD requests are accepted.\n", 405, headers={"Allow": "GET, HEAD"})
        if self.token is None:
            return None
        cookie = f"{COOKIE}-{request.url.port or 80}"
        if _same(request.query_params.get("token", ""), self.token):
            return self._welcome(request, cookie)
        is_here = request.url.path.startswith(f"{self.place}/")
        if not is_here or not _same(request.cookies.get(cookie, ""), self.token):
            return _no(
                "The token is missing or belongs to another server; open the full address that this server printed."
            )
        return None

    def _welcome(self, request: Request, cookie: str) -> Response:
        """Store the token in a cookie, and redirect to the requested page without the token in the URL.

        The page and the cookie's path are below this server's prefix (`self.place`).
        """
        kept = [(name, value) for name, value in parse_qsl(request.url.query) if name != "token"]
        path = f"{self.place}/{request.url.path.removeprefix(self.place).lstrip('/')}"
        answer = RedirectResponse(f"{path}?{urlencode(kept)}" if kept else path, 303)
        answer.set_cookie(cookie, str(self.token), httponly=True, samesite="lax", path=f"{self.place}/")
        return answer

    def _is_host(self, given: str) -> bool:
        name = given.lower()
        if (colon := name.rfind(":")) > name.rfind("]"):
            name = name[:colon]
        return name in self.hosts or (self.numbers and _is_number(name))


def _is_number(name: str) -> bool:
    try:
        ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _same(given: str, token: str) -> bool:
    return secrets.compare_digest(given.encode("utf-8", "replace"), token.encode())


def _no(sentence: str) -> Response:
    return PlainTextResponse(f"{sentence}\n", 403)


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            named = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
            message = {**message, "headers": [*message.get("headers", ()), *named]}
        await send(message)

    return sending
