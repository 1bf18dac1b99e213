"""The endpoint: tries again, pace, servers that are none, and where the key goes."""

import time

import pytest

from datamodules.reasoning.teacher import (
    ChatEndpoint,
    EndpointConfig,
    EndpointError,
    Pace,
    StoppedError,
    messages,
    place_steps,
)
from tests.datamodules.reasoning.endpoint_server import KEY, PROBLEMS, good


def test_a_full_server_is_asked_again(endpoint, server):
    faults = [(429, b"slow down", {}), (503, b"", {}), (500, b"", {})]
    server.answer = lambda problem, before: (
        faults[before] if before < len(faults) else good(problem)
    )
    assert endpoint().complete(messages(PROBLEMS[0])) == good(
        {"problem": PROBLEMS[0].question, "calculations": list(PROBLEMS[0].equations)}
    )
    assert len(server.asked) == 4


def test_a_full_server_is_asked_again_when_it_says(endpoint, server):
    waits = {"Retry-After-Ms": "300"}
    server.answer = lambda problem, before: good(problem) if before else (429, b"", waits)
    began = time.monotonic()
    endpoint().complete(messages(PROBLEMS[0]))
    assert time.monotonic() - began > 0.3


def test_servers_that_cannot_be_reached_are_tried_again(endpoint, server):
    talk = messages(PROBLEMS[0])
    with pytest.raises(EndpointError, match="it cannot be reached .*up to 2 tries"):
        endpoint(url="http://127.0.0.1:9/v1", retries=1).complete(talk)
    server.answer = lambda problem, before: (200, b"half", {"Content-Length": "100"})
    with pytest.raises(EndpointError, match="it cannot be reached"):
        endpoint(retries=1).complete(talk)
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"<html>welcome</html>", r"does not answer as /chat/completions.*<html>welcome"),
        (b'{"error": "unknown"}', r"does not answer as /chat/completions.*unknown"),
        (b'{"choices": 3}', "does not answer as"),
    ],
)
def test_other_servers_are_told_apart(endpoint, server, body, expected):
    server.answer = lambda problem, before: (200, body, {})
    with pytest.raises(EndpointError, match=expected):
        endpoint().complete(messages(PROBLEMS[0]))


@pytest.mark.parametrize("choices", [b"[]", b'[{"message": {"content": null}}]'])
def test_no_answer_is_an_empty_one(endpoint, server, choices):
    server.answer = lambda problem, before: (200, b'{"choices": %s}' % choices, {})
    assert endpoint().complete(messages(PROBLEMS[0])) == ""


def test_a_closed_endpoint_waits_no_longer(endpoint):
    closed = endpoint()
    closed.close()
    with pytest.raises(StoppedError):
        closed.complete(messages(PROBLEMS[0]))


def test_requests_keep_the_pace(endpoint, server):
    """Those that are sent again, too."""
    server.answer = lambda problem, before: good(problem) if before else (500, b"", {})
    asked = endpoint(requests_per_minute=200)
    began = time.monotonic()
    for problem in PROBLEMS[:2]:
        asked.complete(messages(problem))
    assert time.monotonic() - began > 0.6
    assert len(server.asked) == 3


def test_the_pace_spaces_requests_evenly():
    now = [100.0]
    pace = Pace(30, clock=lambda: now[0])
    assert [pace.delay() for _ in range(3)] == [0.0, 2.0, 4.0]
    now[0] = 103.0
    assert pace.delay() == 3.0
    now[0] = 200.0
    assert pace.delay() == 0.0


# ---- the key


def test_the_key_goes_into_the_header_and_nowhere_else(endpoint, server, tmp_path, capsys, caplog):
    output = tmp_path / "aligned.jsonl"
    echo = (401, f"Incorrect API key: {KEY}".encode(), {})
    server.answer = lambda problem, before: good(problem) if before < 2 else echo
    with pytest.raises(EndpointError, match="Check the key in OPENAI_API_KEY") as caught:
        place_steps(PROBLEMS, endpoint().complete, output, concurrency=1)
    assert server.keys == [f"Bearer {KEY}"] * 3
    assert server.paths == ["/v1/chat/completions"] * 3
    assert "Incorrect API key: ***" in str(caught.value)
    written = "".join(path.read_text() for path in tmp_path.iterdir() if path.is_file())
    said = capsys.readouterr()
    config = EndpointConfig(url=server.url, model="m")
    for place in (written, said.out, said.err, caplog.text, str(caught.value), repr(config)):
        assert KEY not in place


def test_the_key_is_not_sent_where_a_server_redirects(endpoint, server):
    there = {"Location": f"{server.url}/elsewhere"}
    server.answer = lambda problem, before: (307, b"moved", there)
    with pytest.raises(EndpointError, match="HTTP 307: moved"):
        endpoint().complete(messages(PROBLEMS[0]))
    assert server.paths == ["/v1/chat/completions"]


def test_keys_come_from_the_environment(endpoint, server, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(ValueError, match=r"environment variable OPENAI_API_KEY is not set"):
        endpoint()
    monkeypatch.setenv("MINE", "other")
    endpoint(key_variable="MINE").complete(messages(PROBLEMS[0]))
    endpoint(key_variable=None).complete(messages(PROBLEMS[0]))
    assert server.keys == ["Bearer other", None]
    monkeypatch.setenv("MINE", "two\nlines")
    with pytest.raises(ValueError, match="MINE holds more than a key") as caught:
        endpoint(key_variable="MINE")
    assert "lines" not in str(caught.value)
    monkeypatch.setenv("MINE", "other")
    with pytest.raises(ValueError, match="would send the key unencrypted"):
        endpoint(url="http://example.com/v1", key_variable="MINE")
    ChatEndpoint(EndpointConfig(url="https://example.com/v1", model="m", key_variable="MINE"))


# ---- settings


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"url": "api.openai.com"}, "url='api.openai.com' must be an address"),
        ({"url": "https://me:word@host/v1"}, "url must not hold a name or a password"),
        ({"model": ""}, "model='' must be a name"),
        ({"requests_per_minute": 0.0}, "requests_per_minute=0.0 must be above 0"),
        ({"retries": -1}, "retries=-1 must be at least 0"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
    ],
)
def test_settings_out_of_range(options, expected):
    with pytest.raises(ValueError, match=expected):
        EndpointConfig(**{"url": "https://a/v1", "model": "m", **options})
