"""A teacher: what it is asked, its endpoint and key, runs that are killed and continued."""

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter

import pytest
from filelock import FileLock

from datamodules.reasoning.gsm8k import MarkedProblems, Solved
from datamodules.reasoning.teacher import (
    EXAMPLES,
    ChatEndpoint,
    EndpointConfig,
    EndpointError,
    Pace,
    RejectedReplyError,
    StoppedError,
    UnfitRequestError,
    dropped_path,
    messages,
    place_steps,
    read_reply,
)
from tests.datamodules.reasoning.endpoint_server import FAST, KEY, PROBLEMS, good, rows


@pytest.fixture
def waits():
    """Seconds that endpoints of `endpoint` would have waited."""
    return []


@pytest.fixture
def endpoint(server, waits):
    """Returns a function that makes an endpoint which does not wait."""

    def wait(seconds):
        waits.append(seconds)
        return False

    def make(**options):
        config = EndpointConfig(**{"url": server.url, "model": "m", **FAST, **options})
        return ChatEndpoint(config, pace=Pace(1e9), wait=wait)

    return make


# ---- what is asked


def test_the_prompt_shows_examples_that_keep_its_own_rules():
    talk = messages(PROBLEMS[0])
    assert [m["role"] for m in talk] == ["system", *["user", "assistant"] * len(EXAMPLES), "user"]
    for example, reply in zip(EXAMPLES, talk[2::2], strict=True):
        problem = Solved(example.query, example.steps, example.answer.strip())
        assert read_reply(reply["content"], problem) == example.marked()
        assert example.steps[-1].endswith(f"={problem.answer}>>")
    asked = json.loads(talk[-1]["content"])
    assert asked == {"problem": PROBLEMS[0].question, "calculations": ["<<0+3=3>>"]}


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ('{"query": "a<T> b", "thinking": ["x"]}', None),
        ('{thoughts} ```json\n{"query": "a<T> b", "thinking": ["x"]}\n``` done {', None),
        ('{"query": "a <T> b", "thinking": ["x"]}', "another problem"),
        ('{"query": "A<T> b", "thinking": ["x"]}', "another problem"),
        ('{"query": "a<T> b", "thinking": ["y"]}', "other calculations"),
        ('{"query": "a b", "thinking": ["x"]}', "another number of markers"),
        ('{"query": "a<T><T> b", "thinking": ["x"]}', "another number of markers"),
        ('{"query": "a<T> b"}', "no such JSON object"),
        ('{"query": "a<T> b", "thinking": ["x"', "no such JSON object"),
        ("I cannot do that.", "no such JSON object"),
        ("[" * 100_000 + "{" * 50, "no such JSON object"),
    ],
)
def test_replies_are_checked_by_exact_match(reply, expected):
    problem = Solved("a b", ("x",), "1")
    if expected is None:
        assert read_reply(reply, problem) == "a<T> b"
    else:
        with pytest.raises(RejectedReplyError, match=expected):
            read_reply(reply, problem)


# ---- the endpoint


def test_a_full_server_is_asked_again_and_later(endpoint, server, waits):
    faults = [
        (429, b"slow down", {"Retry-After": "7"}),
        (429, b"slow down", {"Retry-After": "180"}),
        (503, b"", {}),
        (500, b"", {}),
    ]
    server.answer = lambda problem, before: (
        faults[before] if before < len(faults) else good(problem)
    )
    assert endpoint().complete(messages(PROBLEMS[0])) == good(
        {"problem": PROBLEMS[0].question, "calculations": list(PROBLEMS[0].equations)}
    )
    assert len(server.asked) == 5
    slow = [seconds for seconds in waits if seconds > 0.1]
    assert slow[:2] == [7.0, 180.0]
    assert 2.0 <= slow[2] <= 4.0
    assert 4.0 <= slow[3] <= 8.0


def test_servers_that_cannot_be_reached_are_tried_again(endpoint, server, waits):
    talk = messages(PROBLEMS[0])
    with pytest.raises(EndpointError, match="it cannot be reached .*, 3 times"):
        endpoint(url="http://127.0.0.1:9/v1", retries=2).complete(talk)
    assert len([seconds for seconds in waits if seconds > 0.1]) == 2
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


def test_a_closed_endpoint_ends_the_wait_that_a_server_asked_for(server):
    server.answer = lambda problem, before: (503, b"", {"Retry-After": "120"})
    asked = ChatEndpoint(EndpointConfig(url=server.url, model="m", **FAST))
    threading.Timer(0.5, asked.close).start()
    began = time.monotonic()
    with pytest.raises(StoppedError):
        asked.complete(messages(PROBLEMS[0]))
    assert time.monotonic() - began < 60


def test_an_answer_that_is_too_large_is_refused(endpoint, server):
    server.answer = lambda problem, before: (200, b"x", {"Content-Length": str(2**24 + 1)})
    with pytest.raises(EndpointError, match=f"more than {2**24} bytes"):
        endpoint().complete(messages(PROBLEMS[0]))


def test_no_proxy_stands_between_this_machine_and_itself(endpoint, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert endpoint(retries=0).complete(messages(PROBLEMS[0]))


def test_requests_keep_the_pace(server):
    """Those that are sent again, too."""
    server.answer = lambda problem, before: good(problem) if before else (500, b"", {})
    waits = []
    config = EndpointConfig(**{"url": server.url, "model": "m", **FAST})
    asked = ChatEndpoint(config, pace=Pace(60, clock=lambda: 0.0), wait=waits.append)
    for problem in PROBLEMS[:2]:
        asked.complete(messages(problem))
    backoff, *paced = waits
    assert len(server.asked) == 3
    assert 0.5 <= backoff <= 1.0
    assert paced == [1.0, 2.0]  # the first request waits for nothing


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


@pytest.mark.parametrize("variable", ["OPENAI_API_KEY", None])
def test_nothing_else_of_the_environment_is_sent(endpoint, server, monkeypatch, variable):
    """The client takes organisation, project and any headers from variables of its own."""
    monkeypatch.setenv("OPENAI_ORG_ID", "secret-organisation")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "secret-project")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "Authorization: Bearer secret\nX-My: secret-own")
    endpoint(key_variable=variable).complete(messages(PROBLEMS[0]))
    (headers,) = server.headers
    assert server.keys == [None if variable is None else f"Bearer {KEY}"]
    assert not any("secret" in value and value != f"Bearer {KEY}" for value in headers.values())
    assert not any(name.lower().startswith("x-stainless-os") for name in headers)


def test_a_missing_client_is_named_with_its_cure(endpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(
        ValueError, match=r"needs the package openai .*pip install -e '.\[openai\]'"
    ):
        endpoint()


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


# ---- runs


def test_what_fits_is_kept_for_the_aligned_file(endpoint, server, tmp_path):
    output = tmp_path / "aligned.jsonl"
    replies = {
        PROBLEMS[1].question: "no",
        PROBLEMS[2].question: '{"query": "something else", "thinking": []}',
    }
    server.answer = lambda problem, before: replies.get(problem["problem"]) or good(problem)
    given = [*PROBLEMS, PROBLEMS[0], Solved("Why?", (), "1")]
    counts = place_steps(given, endpoint().complete, output, concurrency=3)
    assert counts == {
        "kept": 6,
        "dropped": 2,
        "dropped: no such JSON object": 1,
        "dropped: another problem": 1,
        "there already": 1,
        "without steps": 1,
    }
    assert [row["reply"] for row in rows(dropped_path(output)) if "no such" in row["reason"]] == [
        "no"
    ]
    aligned = MarkedProblems(output)
    end = PROBLEMS[0].question.index(".")
    places = [aligned.find(problem) for problem in PROBLEMS]
    assert places == [(end,), None, None, *[(end,)] * 5]
    assert all(row["answer"].isdigit() for row in rows(output))


def test_a_second_run_asks_for_nothing_twice(endpoint, server, tmp_path):
    output = tmp_path / "aligned.jsonl"
    server.answer = lambda problem, before: good(problem) if before % 2 else "no"
    ask = endpoint().complete
    first = place_steps(PROBLEMS[:4], ask, output, concurrency=1)
    assert (first["kept"], first["dropped"]) == (2, 2)
    again = place_steps(PROBLEMS, ask, output, concurrency=1)
    assert (again["kept"], again["dropped"], again["there already"]) == (2, 2, 4)
    assert Counter(server.asked) == Counter(problem.question for problem in PROBLEMS)
    dropped_path(output).unlink()  # as its docstring says: they are asked for again
    assert place_steps(PROBLEMS, ask, output)["there already"] == 4


def test_a_killed_run_is_gone_on_with(server, tmp_path):
    output, arrived, hold = tmp_path / "aligned.jsonl", threading.Event(), threading.Event()

    def answer(problem, before):
        if before == 3:
            arrived.set()
            hold.wait(20)
        return good(problem)

    server.answer = answer
    config = EndpointConfig(url=server.url, model="m", **FAST)

    def run():
        place_steps(PROBLEMS, ChatEndpoint(config).complete, output, concurrency=1)

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    assert arrived.wait(20)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    hold.set()
    assert len(rows(output)) == 3
    with output.open("ab") as file:  # as if the kill had come while it was writing
        file.write(b'{"id": "torn", "query": "\xc3')
    counts = place_steps(PROBLEMS, ChatEndpoint(config).complete, output, concurrency=2)
    assert counts == {"there already": 3, "kept": 5}
    assert len({row["id"] for row in rows(output)}) == len(PROBLEMS)
    assert Counter(server.asked)[PROBLEMS[3].question] == 2  # the one on its way was lost
    assert len(server.asked) == len(PROBLEMS) + 1


def test_an_output_has_one_writer_and_lines_of_its_own(endpoint, tmp_path):
    output, ask = tmp_path / "aligned.jsonl", endpoint().complete
    with (
        FileLock(tmp_path / ".aligned.jsonl.lock"),
        pytest.raises(ValueError, match="is being written by another process"),
    ):
        place_steps(PROBLEMS, ask, output)
    output.write_text('{"query": "mine"}\n')
    with pytest.raises(ValueError, match=r"line 1 is not a line of this command's output"):
        place_steps(PROBLEMS, ask, output)
    assert output.read_text() == '{"query": "mine"}\n'


def test_a_refused_request_is_dropped_and_many_in_a_row_end_the_run(endpoint, server, tmp_path):
    output = tmp_path / "aligned.jsonl"
    refused = (400, b"too long", {})
    server.answer = lambda problem, before: refused if before == 1 else good(problem)
    counts = place_steps(PROBLEMS, endpoint().complete, output, concurrency=1)
    assert (counts["kept"], counts["dropped: refused"]) == (7, 1)
    assert "too long" in rows(dropped_path(output))[0]["reply"]
    server.answer = lambda problem, before: (400, b"no such parameter: temperature", {})
    many = [Solved(f"Other {n}?", ("x",), "1") for n in range(40)]
    with pytest.raises(UnfitRequestError, match="no such parameter: temperature"):
        place_steps(many, endpoint().complete, output, concurrency=1)
    assert len(rows(dropped_path(output))) == 1, "those are asked again, when that is fixed"


def test_a_failing_server_ends_the_run_and_keeps_what_it_said(endpoint, server, tmp_path):
    output = tmp_path / "aligned.jsonl"
    broken = (500, b"out of order", {})
    server.answer = lambda problem, before: good(problem) if before < 2 else broken
    with pytest.raises(EndpointError, match=r"HTTP 500: out of order, 3 times.*goes on where"):
        place_steps(PROBLEMS, endpoint(retries=2).complete, output, concurrency=1)
    assert len(rows(output)) == 2
    assert not dropped_path(output).exists()
    server.answer = lambda problem, before: good(problem)
    counts = place_steps(PROBLEMS, endpoint().complete, output, concurrency=1)
    assert counts == {"there already": 2, "kept": 6}
