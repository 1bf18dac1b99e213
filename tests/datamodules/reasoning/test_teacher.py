"""A teacher: what it is asked, its endpoint and key, runs that are killed and continued."""

import json
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter

import pytest
from filelock import FileLock

from datamodules.reasoning.gsm8k import MarkedProblems, SolvedProblem
from datamodules.reasoning.teacher import (
    EXAMPLES,
    ChatEndpoint,
    EndpointConfig,
    EndpointError,
    RejectedReplyError,
    UnfitRequestError,
    dropped_path,
    messages,
    place_steps,
    read_reply,
)
from tests.datamodules.reasoning.endpoint_server import FAST, KEY, PROBLEMS, Server, good, rows


@pytest.fixture
def endpoint(server, monkeypatch):
    """Returns a function that makes an endpoint whose client waits for nothing."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)

    def make(**options):
        config = EndpointConfig(**{"url": server.url, "model": "m", **FAST, **options})
        return ChatEndpoint(config)

    return make


# ---- what is asked


def test_the_prompt_shows_examples_that_keep_its_own_rules():
    talk = messages(PROBLEMS[0])
    assert [m["role"] for m in talk] == ["system", *["user", "assistant"] * len(EXAMPLES), "user"]
    for example, reply in zip(EXAMPLES, talk[2::2], strict=True):
        problem = SolvedProblem(example.query, example.steps, example.answer.strip())
        assert read_reply(reply["content"], problem) == example.marked()
        assert example.steps[-1].endswith(f"={problem.answer}>>")
    asked = json.loads(talk[-1]["content"])
    assert asked == {"problem": PROBLEMS[0].question, "calculations": ["<<0+3=3>>"]}


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ('{"query": "a<T> b", "thinking": ["x"]}', None),
        ('{thoughts} ```json\n{"query": "a<T> b", "thinking": ["x"]}\n``` done {', None),
        ('{"query": "a <T> b", "thinking": ["x"]}', "changed problem"),
        ('{"query": "A<T> b", "thinking": ["x"]}', "changed problem"),
        ('{"query": "a<T> b", "thinking": ["y"]}', "changed calculations"),
        ('{"query": "a b", "thinking": ["x"]}', "wrong number of markers"),
        ('{"query": "a<T><T> b", "thinking": ["x"]}', "wrong number of markers"),
        ('{"query": "a<T> b"}', "no valid JSON object"),
        ('{"query": "a<T> b", "thinking": ["x"', "no valid JSON object"),
        ("I cannot do that.", "no valid JSON object"),
        ("[" * 100_000 + "{" * 50, "no valid JSON object"),
    ],
)
def test_replies_are_checked_by_exact_match(reply, expected):
    problem = SolvedProblem("a b", ("x",), "1")
    if expected is None:
        assert read_reply(reply, problem) == "a<T> b"
    else:
        with pytest.raises(RejectedReplyError, match=expected):
            read_reply(reply, problem)


# ---- the endpoint


def test_a_full_or_failing_server_is_asked_again(endpoint, server):
    faults = [(429, b"slow down", {"Retry-After": "7"}), (503, b"", {}), (500, b"", {})]
    server.answer = lambda problem, before: (
        faults[before] if before < len(faults) else good(problem)
    )
    task = {"problem": PROBLEMS[0].question, "calculations": list(PROBLEMS[0].equations)}
    assert endpoint().complete(messages(PROBLEMS[0])) == good(task)
    assert len(server.asked) == 4


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((200, b"<html>welcome</html>", {}), "Check url"),
        ((200, b'{"error": "unknown"}', {}), "Check url"),
        ((200, b'{"choices": 3}', {}), "Check url"),
        ((200, b"half", {"Content-Length": "100"}), "cannot be reached"),
        ((404, b"no such model", {}), "Check url, model and options"),
        ((401, b"who are you", {}), "Check the key in OPENAI_API_KEY"),
        ((500, b"out of order", {}), "HTTP 500: out of order"),
    ],
)
def test_other_answers_are_one_line_with_a_cure(endpoint, server, answer, expected):
    server.answer = lambda problem, before: answer
    with pytest.raises(EndpointError, match=expected) as error:
        endpoint(retries=1).complete(messages(PROBLEMS[0]))
    assert server.url in str(error.value)
    assert "\n" not in str(error.value)


def test_a_server_that_is_not_there_is_named(endpoint):
    with pytest.raises(EndpointError, match=r"127\.0\.0\.1:9/v1 cannot be reached"):
        endpoint(url="http://127.0.0.1:9/v1", retries=1).complete(messages(PROBLEMS[0]))


@pytest.mark.parametrize("choices", [b"[]", b'[{"message": {"content": null}}]'])
def test_no_answer_is_an_empty_one(endpoint, server, choices):
    server.answer = lambda problem, before: (200, b'{"choices": %s}' % choices, {})
    assert endpoint().complete(messages(PROBLEMS[0])) == ""


# ---- the key


def test_the_key_goes_into_the_header_and_nowhere_else(endpoint, server, tmp_path, capsys, caplog):
    output = tmp_path / "aligned.jsonl"
    echo = (401, f"Incorrect API key: {KEY}".encode(), {})
    server.answer = lambda problem, before: good(problem) if before < 2 else echo
    with pytest.raises(EndpointError, match="OPENAI_API_KEY") as caught:
        place_steps(PROBLEMS, endpoint().complete, output, concurrency=1)
    assert server.keys == [f"Bearer {KEY}"] * 3
    assert server.paths == ["/v1/chat/completions"] * 3
    assert "Incorrect API key: ***" in str(caught.value)
    written = "".join(path.read_text() for path in tmp_path.iterdir() if path.is_file())
    said = capsys.readouterr()
    config = EndpointConfig(url=server.url, model="m")
    for place in (written, said.out, said.err, caplog.text, str(caught.value), repr(config)):
        assert KEY not in place


def test_the_key_is_not_sent_on_to_another_server(endpoint, server):
    with Server() as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        there = {"Location": other.url.replace("127.0.0.1", "localhost") + "/chat/completions"}
        server.answer = lambda problem, before: (307, b"moved", there)
        endpoint(retries=0).complete(messages(PROBLEMS[0]))
        assert server.keys == [f"Bearer {KEY}"]
        assert other.keys == [None]
        other.shutdown()


def test_keys_come_from_the_environment(endpoint, server, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(ValueError, match="OPENAI_API_KEY"):
        endpoint()
    monkeypatch.setenv("MINE", "other")
    endpoint(key_variable="MINE").complete(messages(PROBLEMS[0]))
    endpoint(key_variable=None).complete(messages(PROBLEMS[0]))
    assert server.keys == ["Bearer other", "Bearer none"]
    monkeypatch.setenv("MINE", "two\nlines")
    with pytest.raises(ValueError, match="MINE") as caught:
        endpoint(key_variable="MINE")
    assert "lines" not in str(caught.value)
    monkeypatch.setenv("MINE", "other")
    with pytest.raises(ValueError, match="would send the key unencrypted"):
        endpoint(url="http://example.com/v1", key_variable="MINE")
    ChatEndpoint(EndpointConfig(url="https://example.com/v1", model="m", key_variable="MINE"))


def test_a_missing_client_is_named_with_its_cure(endpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(
        ValueError, match=r"needs the package openai .*pip install -e '.\[openai\]'"
    ):
        endpoint()


# ---- runs


def test_what_fits_is_kept_for_the_aligned_file(endpoint, server, tmp_path):
    output = tmp_path / "aligned.jsonl"
    replies = {
        PROBLEMS[1].question: "no",
        PROBLEMS[2].question: '{"query": "something else", "thinking": []}',
    }
    server.answer = lambda problem, before: replies.get(problem["problem"]) or good(problem)
    given = [*PROBLEMS, PROBLEMS[0], SolvedProblem("Why?", (), "1")]
    counts = place_steps(given, endpoint().complete, output, concurrency=3)
    assert counts == {
        "kept": 6,
        "dropped": 2,
        "dropped: no valid JSON object": 1,
        "dropped: changed problem": 1,
        "already done": 1,
        "without steps": 1,
    }
    assert [row["reply"] for row in rows(dropped_path(output)) if "no valid" in row["reason"]] == [
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
    assert (again["kept"], again["dropped"], again["already done"]) == (2, 2, 4)
    assert Counter(server.asked) == Counter(problem.question for problem in PROBLEMS)
    dropped_path(output).unlink()  # as its docstring says: they are asked for again
    assert place_steps(PROBLEMS, ask, output)["already done"] == 4


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
    assert counts == {"already done": 3, "kept": 5}
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
    with pytest.raises(ValueError, match=r"line 1 was not written by this command"):
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
    many = [SolvedProblem(f"Other {n}?", ("x",), "1") for n in range(40)]
    with pytest.raises(UnfitRequestError, match="no such parameter: temperature"):
        place_steps(many, endpoint().complete, output, concurrency=1)
    assert len(rows(dropped_path(output))) == 1, "those are asked again, when that is fixed"


def test_a_failing_server_ends_the_run_and_keeps_what_it_said(endpoint, server, tmp_path):
    output = tmp_path / "aligned.jsonl"
    broken = (500, b"out of order", {})
    server.answer = lambda problem, before: good(problem) if before < 2 else broken
    with pytest.raises(EndpointError, match=r"HTTP 500: out of order.*continues where"):
        place_steps(PROBLEMS, endpoint(retries=2).complete, output, concurrency=1)
    assert len(rows(output)) == 2
    assert not dropped_path(output).exists()
    server.answer = lambda problem, before: good(problem)
    counts = place_steps(PROBLEMS, endpoint().complete, output, concurrency=1)
    assert counts == {"already done": 2, "kept": 6}
