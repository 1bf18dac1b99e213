"""Methods that think answer the same questions; what is right, how fast and what was thought."""

import csv
import json
import math
import re

import pytest
import torch

from callbacks.answer_accuracy import questions_in
from datamodules import StateTracking
from datamodules.reasoning.two_hop import read_known
from evaluation.load import build_model
from evaluation.reason.asking import AnswerProtocol
from evaluation.reason.contestants import build_contestants
from evaluation.reason.scores import settings_of
from lightning_models import CoconutLM, CodiLM, NoCoTLM, ThinkingStatesLM
from lightning_models.checkpoint import read_checkpoint
from lightning_models.generation import SamplingConfig, generate
from lightning_models.layers import recording
from tests.programs import ROOT

UNTIMED = ("--rounds", "null")
QUICK = ("--rounds", 2, "--timing_batches", 1, "--timing_batch_size", 2, "--max_new_tokens", 6)


@pytest.fixture(scope="module")
def data(reason_options):
    module = StateTracking(**reason_options)
    module.prepare_data()
    module.setup()
    return module


@pytest.fixture
def reason(reasoned, reasoners):
    def run(*words, ckpts=("ts", "no_cot")):
        return reasoned([reasoners.get(name, name) for name in ckpts], *words)

    return run


def by_label(result):
    return {each["label"]: each for each in result["results"]}


# ---- real models


def test_answers_are_those_to_single_questions(reason, reasoners, data):
    """Batches of four; here each question alone, and judged by hand."""
    result, rows, printed = reason(*UNTIMED)
    assert [row["model"] for row in rows] == ["ts"] * 9 + ["no_cot"] * 9
    examples = list(data.examples("test"))
    for name in ("ts", "no_cot"):
        model = build_model(read_checkpoint(reasoners[name]))
        own = [row for row in rows if row["model"] == name]
        for number, (row, example) in enumerate(zip(own, examples, strict=True)):
            written = generate(
                model,
                [data.tokenizer.prompt_ids(example.query)],
                max_new_tokens=20,
                sampling=SamplingConfig(temperature=0),
                stop_ids=(data.tokenizer.eos_id,),
                vocab_size=data.vocab_size,
            )[0]
            text = data.tokenizer.decode(written[:-1]).strip()
            assert (row["query"], row["gold"]) == (example.query, example.answer.strip())
            assert (row["text"], row["number"], row["group"]) == (text, number, example.group)
            assert row["right"] == (text == example.answer.strip())
        numbers, right = by_label(result)[name], [row["right"] for row in own]
        share = sum(right) / 9
        assert numbers["accuracy"] == pytest.approx(share)
        assert 0 < share < 1  # both kinds are there
        error = math.sqrt(share * (1 - share) / 9)
        assert numbers["standard_error"] == pytest.approx(error)
        assert f"{share:.4f} +- {error:.4f} of 9 " in printed
        for found, group, count in zip(numbers["by_group"], (1, 2), (5, 4), strict=True):
            here = [row["right"] for row in own if row["group"] == group]
            assert (found["operations"], found["questions"]) == (group, count)
            assert found["accuracy"] == pytest.approx(sum(here) / count)
    assert "s/question" not in printed


def test_questions_that_are_too_long_are_left_out_and_counted(reason, data):
    """A row has an EOS, its texts, and an EOS."""
    sizes = []
    for example in data.examples("test"):
        steps = (text for step in example.steps for text in (data.step_separator, step))
        texts = (example.query, *steps, data.answer_prefix, example.answer)
        sizes.append(2 + sum(len(data.tokenizer.encode(text)) for text in texts))
    block_size = sorted(sizes)[6]
    fitting = [number for number, size in enumerate(sizes) if size <= block_size]
    assert len(fitting) < 9
    with pytest.warns(UserWarning, match=f"{9 - len(fitting)} of 9 questions of the test split"):
        result, rows, printed = reason(*UNTIMED, "--data.block_size", block_size, ckpts=("ts",))
    assert [row["number"] for row in rows] == fitting
    assert result["data"]["left_out"] == 9 - len(fitting)
    assert result["results"][0]["questions"] == len(fitting)
    assert f"{9 - len(fitting)} more are longer than block_size, and left out" in printed


def test_thoughts_are_those_of_the_model(reason, reasoners, data):
    """Recorded again, one query at a time."""
    result, rows, _ = reason(*UNTIMED, ckpts=("ts",))
    model, tokenizer = build_model(read_checkpoint(reasoners["ts"])), data.tokenizer
    for row in rows:
        seen = []
        query = tokenizer.prompt_ids(row["query"])
        with recording(thoughts=lambda trace, seen=seen: seen.append(trace)):
            model.init_cache(torch.tensor([query]), torch.tensor([len(query)]), 1)
        (trace,) = seen
        thoughts = [
            {"token": thought.end, "text": tokenizer.decode(thought.tokens).strip()}
            for thought in trace.rows[0]
            if thought.tokens
        ]
        assert row["thoughts"] == thoughts
        assert (row["rounds"], row["nontrivial_chunks"]) == (trace.rounds[0], len(thoughts))
        assert row["chunks"] == -(-len(query) // 4)
        for thought in thoughts:
            before = tokenizer.decode(query[1 : thought["token"] + 1]).split()[-1]
            assert f"{before} [T: {thought['text']}]" in row["query_with_thoughts"]
    (numbers,) = result["results"]
    for key in ("rounds", "nontrivial_chunks", "chunks"):
        assert 0 < numbers[key] == pytest.approx(sum(row[key] for row in rows) / 9)


def test_every_method_answers_and_is_timed(reason, reasoners):
    result, rows, printed = reason("--latents", 1, 3, *QUICK, ckpts=reasoners)
    found = by_label(result)
    assert list(found) == [
        *("ts", "cot", "no_cot", "icot"),
        *("coconut, eval_latents 1", "coconut, eval_latents 3"),
    ]
    assert len(rows) == 6 * 9
    for label, numbers in found.items():
        assert ("rounds" in numbers) == (label == "ts")
        assert len(numbers["seconds_per_question_by_round"]) == 2
        assert min(numbers["seconds_per_question_by_round"]) > 0
    assert found["cot"]["speed_up"] == 1.0  # of rounds with themselves
    assert result["baseline"] == "cot"
    assert "speed-ups are over cot" in printed
    assert "2 rounds over the first 2 questions, 2 at a time" in printed
    assert found["coconut, eval_latents 3"]["latents"] == 3
    assert found["coconut, eval_latents 3"]["settings"]["set"] == {"eval_latents": 3}
    assert found["coconut, eval_latents 3"]["settings"]["stage"] == 1
    result, _, _ = reason(*UNTIMED, "--limit_batches", 1)
    assert result["baseline"] is None  # nobody is timed


def test_numbers_of_latents_share_one_set_of_weights(reasoners, data):
    """Each contestant answers as a model of its own would that was built with its number."""
    checkpoint = read_checkpoint(reasoners["coconut"])
    options = {"changes": {}, "label": None, "device": torch.device("cpu")}
    contestants = build_contestants([(None, checkpoint)], latents=[1, 4], **options)
    assert len({id(one.model) for one in contestants}) == 1
    batch = questions_in(data.evaluation_source("test").batch(0))
    room = {"max_new_tokens": 12, "temperature": 0, "tokenizer": data.tokenizer}
    asking = AnswerProtocol(data, "generate", 12)
    for one in contestants:
        alone = build_model(checkpoint, {"eval_latents": one.latents})
        with one.ready() as model:
            assert model.recipe() == alone.recipe()
        replies = asking.replies(one, [batch], 64).replies
        written = alone.generate_ids([each.query for each in batch], **room)
        assert [reply.written for reply in replies] == written
        assert model.config.eval_latents is None  # as before
    assert settings_of(contestants, "eval_latents") == ("eval_latents", [1, 4])


def test_controls_replace_latents_and_leave_the_model_as_it_was(reason):
    controls = ("zero", "noise", "swap", "pause")
    options = ("--replace_latents", *controls, "--noise_seed", 3)
    ckpts, written = ("ts", "coconut"), {}
    plain, rows, _ = reason(*UNTIMED, "--data.eval_batch_size", 2, ckpts=ckpts)
    for row in rows:
        written.setdefault(row["model"], []).append(row)
    result, rows, printed = reason(*QUICK[:-2], *options, ckpts=ckpts)
    assert "replaced by" in printed
    found = by_label(result)
    labels = [
        name for ts in ckpts for name in (ts, *(f"{ts}, replace_latents {c}" for c in controls))
    ]
    assert list(found) == labels
    for label, numbers in found.items():
        _, _, control = label.partition(", replace_latents ")
        assert numbers.get("replace_latents", "") == control
        assert numbers.get("noise_seed") == (3 if control == "noise" else None)
        assert ("speed_up" in numbers) == (not control), "controls are not timed"
    answers = {label: [row for row in rows if row["model"] == label] for label in labels}
    for label in ckpts:
        assert answers[label] == written[label]
    for numbers in plain["results"]:
        now = found[numbers["label"]]
        for key in ("accuracy", "by_group", "flops_per_token", "settings"):
            assert now[key] == numbers[key]
    _, ones, _ = reason(*UNTIMED, *options, "--data.eval_batch_size", 1, ckpts=ckpts)
    assert ones == rows
    _, silent, _ = reason(*UNTIMED, "--set.think", "false", ckpts=("ts",))
    texts = [row["written"] for row in silent]
    assert [row["written"] for row in answers["ts, replace_latents zero"]] == texts
    _, cut, _ = reason(*UNTIMED, *options, "--limit_batches", 1, ckpts=("coconut",))
    first = [row for label in labels if "coconut" in label for row in answers[label][:4]]
    assert cut == first, "the last question asked is given the latents of the next one"


@pytest.mark.parametrize("name", ["cot", "no_cot", "icot"])
def test_controls_are_refused_where_there_are_no_latents(fails, reasoners, name):
    line = fails("reason", "--ckpt", reasoners["ts"], reasoners[name], "--replace_latents", "zero")
    kind = {"cot": "CoTLM", "no_cot": "NoCoTLM", "icot": "ICoTLM"}[name]
    assert f"replace_latents (zero): {kind} ({reasoners[name]}) feeds no latents back" in line


def test_controls_are_refused_where_a_model_is_told_not_to_think(fails, reasoners):
    words = ("--replace_latents", "zero", "--set.think", "false")
    line = fails("reason", "--ckpt", reasoners["ts"], *words)
    cure = "leave it out of --ckpt, or leave out --set.think"
    assert line.endswith(f"feeds no latents back with think false; {cure}")


@pytest.mark.parametrize(
    ("kind", "changes", "latents", "at"),
    [
        (CodiLM, {"passes": 0}, [], ""),
        (CodiLM, {"passes": 0}, [2], ""),
        (CodiLM, {"num_latents": 0}, [], " with eval_latents 0"),
        (CodiLM, {}, [3, 0], " with eval_latents 0"),
        (CoconutLM, {"first_stage": 0}, [], " with eval_latents 0"),
    ],
)
def test_controls_are_refused_where_no_latent_is_fed_back(
    train_reasoner, data, tmp_path, kind, changes, latents, at
):
    path = train_reasoner(tmp_path / "a.ckpt", data, kind, 1, **changes)
    options = {"changes": {}, "label": None, "device": torch.device("cpu")}
    line = rf"^replace_latents \(zero, swap\): {kind.__name__} \(.*a.ckpt\) feeds no latents back"
    with pytest.raises(ValueError, match=f"{line}{at}; leave it out of --ckpt"):
        build_contestants(
            [(None, read_checkpoint(path))], latents=latents, controls=("zero", "swap"), **options
        )


def test_one_question_has_no_other_to_swap_with(fails, reasoners):
    words = ("--replace_latents", "swap", "--data.test_examples", 1)
    line = fails("reason", "--ckpt", reasoners["ts"], *words, *UNTIMED)
    assert "replace_latents (swap) needs at least 2 questions" in line


def test_other_questions_of_the_task(reason):
    """Longer ones than in training leave a chain the room that it would need."""
    words = ("--data.test_operations", "[3,3]", "--data.test_examples", 2)
    result, rows, _ = reason(*words, "--data.block_size", 160, *UNTIMED, ckpts=("cot",))
    assert {row["group"] for row in rows} == {3}
    (numbers,) = result["results"]
    assert numbers["settings"]["set"] == {"block_size": 160}
    longest = 3 + 1  # steps; prefix, answer and EOS come after them
    assert result["settings"]["max_new_tokens"] > 2 * longest
    assert result["data"]["split"] == "test"


@pytest.fixture(scope="module")
def larger_chunks(reason_options, train_reasoner, tmp_path_factory):
    path = tmp_path_factory.mktemp("chunks") / "eight.ckpt"
    changes = {"chunk_size": 8, "max_thought_tokens": 4}
    return train_reasoner(path, StateTracking(**reason_options), ThinkingStatesLM, 1, **changes)


def test_ablations_side_by_side(reason, larger_chunks, tmp_path):
    """Fig. 3: accuracy and speed-up over a setting, and lines for models without it."""
    picture = tmp_path / "chunks.svg"
    words = ("--figure", picture, "--against", "chunk_size", *QUICK)
    result, _, printed = reason(*words, ckpts=("ts", larger_chunks, "cot"))
    labels = list(by_label(result))
    assert [label.rpartition("/")[2] for label in labels] == ["ts", "eight", "cot"]
    assert all(label in printed for label in labels)
    assert "<svg" in picture.read_text()
    with picture.with_suffix(".csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["chunk_size"] for row in rows] == ["4.0", "8.0", ""]
    for row in rows:
        numbers = by_label(result)[row["label"]]
        assert float(row["accuracy"]) == numbers["accuracy"]
        assert float(row["speed_up"]) == numbers["speed_up"]


def test_the_figure_has_its_numbers_next_to_it(reason, tmp_path):
    picture = tmp_path / "groups.png"
    result, _, _ = reason("--figure", picture, *UNTIMED)
    assert picture.read_bytes().startswith(b"\x89PNG")
    with picture.with_suffix(".csv").open(newline="") as file:
        rows = [
            (row["label"], int(row["operations"]), float(row["accuracy"]))
            for row in csv.DictReader(file)
        ]
    assert rows == [
        (each["label"], group["operations"], group["accuracy"])
        for each in result["results"]
        for group in each["by_group"]
    ]
    reason("--figure", picture, "--against", "recurrence", *UNTIMED, "--limit_batches", 1)
    with picture.with_suffix(".csv").open(newline="") as file:
        assert [row["recurrence"] for row in csv.DictReader(file)] == ["1.0", ""]


def test_other_data_of_the_class_and_names_of_the_models(reason, reasoners):
    words = ("--data.task", "vars", "--data.test_examples", 2)
    ckpts = (f"states={reasoners['ts']}", reasoners["no_cot"])
    result, rows, _ = reason(*words, "--max_new_tokens", 3, *UNTIMED, ckpts=ckpts)
    assert [row["model"] for row in rows] == ["states"] * 2 + ["no_cot"] * 2
    assert all(row["query"].startswith("Track the variables") for row in rows)
    assert result["data"]["recipe"]["init_args"]["task"] == "vars"
    assert result["data"]["recipe"]["init_args"]["answer_prefix"] is None  # that of the task
    assert {row["right"] for row in rows} == {False}
    result, _, _ = reason(*UNTIMED, "--label", "chunk_size", "--limit_batches", 1, ckpts=ckpts)
    assert list(by_label(result)) == ["chunk_size 4", "-"]


# ---- recipes of the paper's results


def recipe(name, **replaced):
    """Text of a script of docs/papers, with some texts replaced."""
    text = (ROOT / "docs/papers" / f"{name}.py").read_text()
    for old, new in replaced.items():
        assert f'"{old}"' in text
        text = text.replace(f'"{old}"', repr(str(new)))
    return text


def run_recipe(block):
    names = {}
    exec(block, names)
    return names


def test_the_question_first_and_what_one_solves_and_another_does_not(
    reason, reasoners, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    ckpts = ("ts", "no_cot")
    _, before, _ = reason(*UNTIMED, ckpts=ckpts)
    (tmp_path / "answers.jsonl").replace("before.jsonl")
    _, after, _ = reason(
        *UNTIMED, "--data.question_first", "true", "--data.block_size", 192, ckpts=ckpts
    )
    (tmp_path / "answers.jsonl").replace("after.jsonl")
    for one, other in zip(before, after, strict=True):
        assert other["query"] == f"What is the final state of the coin? {one['query']}"
        assert (other["gold"], other["number"]) == (one["gold"], one["number"])
    shares = run_recipe(recipe("question_first"))["shares"]
    for label in ckpts:
        pairs = [
            (one["right"], other["right"])
            for one, other in zip(before, after, strict=True)
            if one["model"] == label
        ]
        wrong = [again for first, again in pairs if not first]
        assert shares.loc[label, "first"] == pytest.approx(sum(b for _, b in pairs) / 9)
        assert shares.loc[label, "recovered"] == pytest.approx(sum(wrong) / len(wrong))
        assert shares.loc[label, "intervention"] == pytest.approx(sum(a or b for a, b in pairs) / 9)
    (tmp_path / "before.jsonl").replace("answers.jsonl")
    overlaps = run_recipe(recipe("overlaps"))["share"]
    flags = {name: [row["right"] for row in before if row["model"] == name] for name in ckpts}
    for solves, fails in (ckpts, ckpts[::-1]):
        count = sum(a and not b for a, b in zip(flags[solves], flags[fails], strict=True))
        assert overlaps.loc[solves, fails] == pytest.approx(count / sum(flags[solves]))
        assert overlaps.loc[solves, solves] == 0


def test_known_facts_are_what_a_model_goes_on_with(tiny_gpt2, tmp_path):
    """The recipe asks in padded batches; here each question alone, one pass a token."""
    model, words, folder = tiny_gpt2

    def continued(question):
        ids = words.encode(question)
        for _ in range(10):
            with torch.no_grad():
                ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
        text = words.decode(ids[-10:]).partition("<|endoftext|>")[0]
        return text.strip().split("\n")[0]

    first, second = "the thought reads", "latent memory state"
    name = re.findall(r"\w\w+", continued(first))[0]
    keys = ["e1.value", "e2.value", "e3.value", "r1(e1).prompt", "r2(e2).prompt"]
    row = dict(zip(keys, ["the", name.upper(), "nobody at all", first, second], strict=True))
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*row, "r2(r1(e1)).prompt"])
        writer.writeheader()
        writer.writerow({**row, "r2(r1(e1)).prompt": "a"})
        writer.writerow({**row, "e3.value": name[:-1], "r2(r1(e1)).prompt": "b"})
    output = tmp_path / "known.jsonl"
    files = {"Qwen/Qwen2.5-1.5B": folder, "TwoHopFact.csv": tmp_path / "a.csv"}
    run_recipe(recipe("known_facts", **files, **{"known.jsonl": output}))
    assert read_known(output) == {first: True, second: False}
    rows = {row["question"]: row for row in map(json.loads, output.read_text().splitlines())}
    assert {text: row["written"] for text, row in rows.items()} == {
        text: continued(text) for text in (first, second)
    }
    assert rows[second]["object"] == "nobody at all"


def test_steps_that_are_moved(reasoners, data, monkeypatch):
    monkeypatch.setattr(type(data.stored("val")), "crossings", lambda stored, size: 2 + size)
    names = run_recipe(recipe("moved_steps", **{"runs/gsm/thinking_states": reasoners["ts"]}))
    assert names["moved"] == dict.fromkeys(("train", "val", "test"), 2 + 4)


# ---- other commands on these checkpoints


def test_tokens_cannot_be_scored_one_by_one(fails, reasoners):
    line = fails("perplexity", "--ckpt", reasoners["ts"], "--mode", "autoregressive")
    assert "mode (autoregressive) draws from windows, and StateTracking has none" in line


# ---- bad input


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--rounds", "0"], "--rounds: "),
        (["--timing_batch_size", "0"], "--timing_batch_size: "),
        (["--latents", "3"], "eval_latents"),
        (["--latents", "-1"], "--latents: "),
        (["--replace_latents", "ones"], "--replace_latents: "),
        (["--mode", "rank"], "mode (rank)"),
        (["--against", "chunk_size"], "against (chunk_size)"),
        (["--figure", "x.gif"], "figure (x.gif)"),
        (["--figure", "x.svg", "--against", "width"], "against (width)"),
        (["--figure", "x.svg", "--against", "grid"], "against (grid)"),
        (["--label", "width"], "label (width)"),
        (["--data.test_operations", "[9]"], "block_size=96"),
        (["--task", "vars"], "--task"),
        (["--ckpt", "a=none.ckpt"], "there is no checkpoint at none.ckpt"),
    ],
)
def test_wrong_options_end_in_one_line(fails, reasoners, words, named):
    assert named in fails("reason", "--ckpt", reasoners["ts"], *words)


def test_models_of_other_kinds_are_refused(fails, reasoners, checkpoint_path):
    assert f"ckpt ({checkpoint_path})" in fails(
        "reason", "--ckpt", reasoners["ts"], checkpoint_path
    )


def test_another_tokenizer_is_named(fails, reason_options, reasoners, train_reasoner, tmp_path):
    data = StateTracking(**{**reason_options, "tokenizer": "bpe:299"})
    other = train_reasoner(tmp_path / "other.ckpt", data, NoCoTLM, 1)
    line = fails("reason", "--ckpt", reasoners["ts"], other)
    assert f"ckpt ({other}): the data's tokenizer" in line
