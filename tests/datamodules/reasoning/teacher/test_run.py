"""Runs that place the steps of many problems: kept, dropped, ended, and gone on with."""

import multiprocessing
import os
import signal
import threading
from collections import Counter

import pytest
from filelock import FileLock

from datamodules.reasoning.gsm8k import MarkedProblems, Solved
from datamodules.reasoning.teacher import (
    ChatEndpoint,
    EndpointConfig,
    EndpointError,
    UnfitRequestError,
    dropped_path,
    place_steps,
)
from tests.datamodules.reasoning.endpoint_server import FAST, PROBLEMS, good, rows


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
    with pytest.raises(EndpointError, match=r"HTTP 500: out of order, .*3 tries.*goes on where"):
        place_steps(PROBLEMS, endpoint(retries=2).complete, output, concurrency=1)
    assert len(rows(output)) == 2
    assert not dropped_path(output).exists()
    server.answer = lambda problem, before: good(problem)
    counts = place_steps(PROBLEMS, endpoint().complete, output, concurrency=1)
    assert counts == {"there already": 2, "kept": 6}
