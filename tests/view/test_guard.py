"""The viewer's guard: who gets a response, and what a browser may do with it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from starlette.testclient import TestClient

from agentgym.view.guard import HEADERS
from agentgym.view.runs import Runs
from agentgym.view.search.indexing import Indexing
from agentgym.view.server import application, page_files
from tests.view.made_runs import HOSTS, client, make_run

TOKEN = "right-token"
PLACES = ["/", "/app.js", "/api/runs", "/api/runs/x/rollouts/1", "/api/nix", "/nix"]


@pytest.mark.parametrize("place", PLACES)
def test_requests_without_the_token_are_refused(tmp_path: Path, place: str) -> None:
    with client(tmp_path, token=TOKEN) as asked:
        for query in ("", "?token=", "?token=wrong", "?token=right-token2", "?token=%F0%9F"):
            answer = asked.get(place + query)
            assert answer.status_code == 403
            assert "open the full address" in answer.text


@pytest.mark.parametrize("query", ["token=right-token", "a=1&token=right-token", "token=right-token&x=%26+%C3%A9"])
def test_the_first_visit_sets_a_cookie_and_removes_the_token_from_the_url(tmp_path: Path, query: str) -> None:
    make_run(tmp_path / "mine")
    with client(tmp_path, token=TOKEN) as asked:
        answer = asked.get(f"/?{query}")
        assert answer.status_code == 303
        assert "token" not in answer.headers["location"]
        assert answer.headers["location"].startswith("/")
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=lax" in cookie
        place = answer.headers["location"].partition("?")[0]
        assert asked.get(answer.headers["location"]).status_code == 200
        assert asked.get(f"{place}api/runs").json()["runs"][0]["name"] == "mine"
        assert asked.get(f"{place}app.js").headers["content-type"].startswith("text/javascript")
        assert asked.get(f"{place}nix").status_code == 404


def test_a_browser_sends_the_cookie_to_no_other_server_on_the_machine(tmp_path: Path) -> None:
    """Cookies don't depend on ports: only their path keeps them from other servers on 127.0.0.1."""
    with client(tmp_path, token=TOKEN) as asked:
        answer = asked.get(f"/?token={TOKEN}")
        place = answer.headers["location"]
        assert len(place) > 16
        assert f"Path={place};" in f"{answer.headers['set-cookie']};"
        for port in (8765, 9999):
            for path in ("/", "/api/runs", f"{place.rstrip('/')}x/"):
                assert "cookie" not in asked.build_request("GET", f"http://127.0.0.1:{port}{path}").headers
        (value,) = asked.cookies.values()
        (name,) = asked.cookies
        assert asked.get("/api/runs", headers={"Cookie": f"{name}={value}"}).status_code == 403


@pytest.mark.parametrize("path", ["//evil.example/x", "/\\evil.example", "///evil.example", "/%2f%2fevil.example"])
def test_the_token_cannot_redirect_to_another_host(tmp_path: Path, path: str) -> None:
    with client(tmp_path, token=TOKEN) as asked:
        location = asked.get(f"http://127.0.0.1:8765{path}?token={TOKEN}").headers["location"]
    assert location.startswith("/")
    assert not location.startswith(("//", "/\\"))


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "evil.example:8765", "", "0.0.0.0", "[::2]:1"]
)
def test_other_host_names_are_refused_to_prevent_dns_rebinding(tmp_path: Path, host: str) -> None:
    with client(tmp_path) as asked:
        answer = asked.get("/api/runs", headers={"Host": host})
    assert answer.status_code == 403
    assert "host name" in answer.text


@pytest.mark.parametrize(
    ("host", "status"), [("10.0.0.7:80", 200), ("[fe80::1]:80", 200), ("evil.example", 403), ("[evil", 403)]
)
def test_a_network_server_accepts_numeric_addresses_and_known_names_only(host: str, status: int) -> None:
    app = application(Runs([]), Indexing(), token=None, hosts=HOSTS, numbers=True)
    assert TestClient(app, base_url="http://127.0.0.1").get("/", headers={"Host": host}).status_code == status


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:1", "LOCALHOST:8765"])
def test_names_of_this_machine_are_accepted(tmp_path: Path, host: str) -> None:
    with client(tmp_path) as asked:
        assert asked.get("/api/runs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_get_is_allowed_and_other_origins_get_no_permissions(tmp_path: Path, method: str) -> None:
    with client(tmp_path) as asked:
        answer = asked.request(method, "/api/runs", headers={"Origin": "https://evil.example"})
        assert answer.status_code == 405
        got = asked.get("/api/runs", headers={"Origin": "https://evil.example"})
    assert not [name for name in (*answer.headers, *got.headers) if name.startswith("access-control")]


@pytest.mark.parametrize("place", PLACES)
def test_every_response_forbids_foreign_scripts_frames_and_type_sniffing(tmp_path: Path, place: str) -> None:
    with client(tmp_path, token=TOKEN) as asked:
        refused = asked.get(place)
        below = asked.get(f"/?token={TOKEN}").headers["location"].rstrip("/")
        answers = [refused, asked.get(f"{below}{place}"), asked.get("/", headers={"Host": "evil"}), asked.post("/")]
    for answer in answers:
        assert {name: answer.headers[name] for name in HEADERS} == dict(HEADERS)
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def status_of(path: str) -> int:
    """Return the status for a path that no client has normalized."""
    app = application(Runs([]), Indexing(), token=None, hosts=HOSTS)
    said: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        said.append(message)

    scope: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode("utf-8", "replace"),
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1")],
        "server": ("127.0.0.1", 80),
        "scheme": "http",
    }

    async def ask() -> None:
        await app(scope, receive, send)

    asyncio.run(ask())
    return int(said[0]["status"])


OUT = ["../guard.py", "a/../../guard.py", "//etc/passwd", "/etc/passwd", "..", "page/../../guard.py", "."]
ODD = [".hidden", "..\\guard.py", "\0", "index.html\0.js", "index.html/", "\udcff", "a" * 5000, "/index.html", "x/"]


@pytest.mark.parametrize("path", [*OUT, *ODD])
def test_no_path_leads_out_of_the_pages_folder(path: str) -> None:
    assert status_of(f"/{path}") == 404


@settings(max_examples=100, deadline=None)
@given(path=st.text(st.sampled_from(list("./\\%2ef0~:ainpgs\0")), min_size=1, max_size=20))
def test_any_path_is_a_file_of_the_page_or_missing(path: str) -> None:
    assert status_of(f"/{path}") == (200 if path in page_files() else 404)


def test_the_page_and_its_files_have_fixed_content_types(tmp_path: Path) -> None:
    with client(tmp_path) as asked:
        answer = asked.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "<!doctype html>" in answer.text
