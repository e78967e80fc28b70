"""The files of the page, as the worker serves them; `tests/system/page` shows them to a browser."""

from __future__ import annotations

import re

from tests import ROOT
from tests.support.worker import WorkerProcess
from worker.api.http.page import NO_CHAT, has_chat


def test_the_page_is_small_and_its_policy_closed(worker: WorkerProcess) -> None:
    response = worker.get("/")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    folder = ROOT / "worker" / "assets" / "page"
    served = [p for p in folder.rglob("*") if p.suffix in (".html", ".css", ".js", ".svg")]
    assert sum(p.stat().st_size for p in served) < 200_000
    for path in served:
        name = path.relative_to(folder).as_posix()
        answer = worker.get({"index.html": "/", "docs.html": "/docs/"}.get(name, f"/page/{name}"))
        assert answer.content == path.read_bytes()
    assert worker.get("/page/../../settings.py").status_code == 404


def test_an_unchanged_page_is_not_sent_again(worker: WorkerProcess) -> None:
    with worker.client() as client:
        tag = client.get("/docs/").headers["etag"]
        for tags in (tag, f"W/{tag}", f'"a", {tag}', f'W/"a",W/{tag}'):
            answer = client.get("/docs/", headers={"if-none-match": tags})
            assert (answer.status_code, answer.content) == (304, b""), tags
        assert client.get("/docs/", headers={"if-none-match": '"a"'}).status_code == 200
        moved = client.get("/docs?q=a%20b", follow_redirects=False)
        assert moved.headers["location"] == "docs/?q=a%20b"


def test_the_chat_is_served_or_a_404_says_how_to_build_it(worker: WorkerProcess) -> None:
    response = worker.get("/chat/")
    if not has_chat():
        assert response.status_code == 404
        assert response.json()["message"] == NO_CHAT
        paths = {each["path"] for each in worker.get("/status").json()["refusals"]}
        assert not paths & {"/chat", "/chat/"}, "the status page itself asks"
        return
    policy = response.headers["content-security-policy"]
    scripts = policy.partition("script-src ")[2].partition(";")[0]
    assert "default-src 'none'" in policy and "unsafe" not in scripts
    with worker.client() as client:
        plain = client.get("/chat/", headers={"accept-encoding": "identity"})
        packed = client.get("/chat/", headers={"accept-encoding": "gzip"})
        assert packed.headers["content-encoding"] == "gzip" and packed.content == plain.content
        assert packed.headers["etag"] != plain.headers["etag"]
        known = {"accept-encoding": "identity", "if-none-match": plain.headers["etag"]}
        assert client.get("/chat/", headers=known).status_code == 304
        moved = client.get("/chat", follow_redirects=False)
        assert (moved.status_code, moved.headers["location"]) == (308, "chat/")
        bundle = re.search(r'"\./(_app/immutable/[^"]+\.js)"', plain.text)
        assert bundle is not None
        kept = client.head(f"/chat/{bundle[1]}").headers["cache-control"]
        assert "immutable" in kept and packed.headers["cache-control"] == "no-cache"
    assert "MIT" in worker.get("/chat/NOTICES.txt").text


def test_the_api_is_served_below_the_chat_too(worker: WorkerProcess) -> None:
    """The page requests it relative to its own path."""
    assert worker.get("/chat/v1/models").json() == worker.get("/v1/models").json()
    assert worker.get("/chat/props").status_code == 200
    assert worker.post("/chat/v1/chat/completions", {}).status_code == 400
    assert worker.get("/chat/chat/props").status_code == 404
    assert worker.get("/chat/nothing").status_code == 404
