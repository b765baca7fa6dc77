"""Examples are read whole or refused clearly, and drawn in an order that survives a checkpoint."""

import json
import sys
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from agentrl.config import DataConfig
from agentrl.cursor import ExampleCursor, all_groups
from agentrl.data import Examples, load_examples
from agentrl.errors import DependencyError, UsageError
from agentrl.executors.base import AgentInstance
from agentrl.plugin import Agent

ROWS = [{"id": "a", "prompt": "1 + 1"}, {"prompt": "2 + 2"}, {"id": 7, "prompt": "3 + 3"}]


class FromTheRow(AgentInstance):
    needs_prompt = True


def make_agent(examples=None, *, needs_prompt: bool = False) -> Agent:
    return Agent("Test", Path(__file__), FromTheRow if needs_prompt else AgentInstance, examples)


def write_lines(path: Path, rows) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


def ids_of(examples: Examples) -> list[str]:
    return [examples[index][0] for index in range(len(examples))]


def test_json_lines_keep_order_and_take_the_id_or_the_index(tmp_path: Path):
    path = write_lines(tmp_path / "data.jsonl", ROWS)
    examples = load_examples(DataConfig(path=path), make_agent())
    assert ids_of(examples) == ["a", "1", "7"]
    assert examples[1][1] == ROWS[1]


def test_a_line_separator_inside_a_string_does_not_end_a_json_line(tmp_path: Path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False) + "\n\n")
    assert load_examples(DataConfig(path=str(path)), make_agent())[0][1]["prompt"] == "a\u2028b"


def test_a_json_array_and_parquet_hold_the_same_rows(tmp_path: Path):
    (tmp_path / "data.json").write_text(json.dumps(ROWS[:2]))
    table = pyarrow.Table.from_pylist([{"prompt": row["prompt"]} for row in ROWS])
    pyarrow.parquet.write_table(table, tmp_path / "data.parquet")
    array = load_examples(DataConfig(path=str(tmp_path / "data.json")), make_agent())
    parquet = load_examples(DataConfig(path=str(tmp_path / "data.parquet")), make_agent())
    assert ids_of(array) == ["a", "1"]
    assert ids_of(parquet) == ["0", "1", "2"]
    assert parquet[2][1] == {"prompt": "3 + 3"}


def test_a_saved_hugging_face_dataset_is_read_by_split(tmp_path: Path):
    import datasets

    splits = {
        "train": datasets.Dataset.from_list([{"prompt": "x"}] * 3),
        "test": datasets.Dataset.from_list([{"prompt": "y"}] * 2),
    }
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "set"))
    config = DataConfig(path=str(tmp_path / "set"), max_samples=2)
    assert len(load_examples(config, make_agent())) == 2
    assert load_examples(config, make_agent(), evaluation=True)[0] == ("0", {"prompt": "y"})
    with pytest.raises(UsageError, match="cannot load the split 'none'"):
        load_examples(DataConfig(path=str(tmp_path / "set"), split="none"), make_agent())


def test_without_the_extra_a_hugging_face_name_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DependencyError, match=r"pip install 'agentrl\[datasets\]'"):
        load_examples(DataConfig(path="someone/something"), make_agent())


@pytest.mark.parametrize("kind", [list, iter, tuple])
def test_examples_of_the_agent_may_be_a_list_or_an_iterator(kind):
    examples = load_examples(DataConfig(), make_agent(lambda split: kind(ROWS)))
    assert ids_of(examples) == ["a", "1", "7"]


def test_the_agent_is_asked_for_the_split_of_training_or_of_evaluation():
    agent = make_agent(lambda split: [{"split": split}])
    config = DataConfig(split="mine", eval_split="other")
    assert load_examples(config, agent)[0][1] == {"split": "mine"}
    assert load_examples(config, agent, evaluation=True)[0][1] == {"split": "other"}


def test_evaluation_has_a_file_of_its_own_or_says_that_it_has_none(tmp_path: Path, caplog):
    train = write_lines(tmp_path / "train.jsonl", ROWS)
    test = write_lines(tmp_path / "test.jsonl", ROWS[:1])
    config = DataConfig(path=train, eval_path=test)
    assert len(load_examples(config, make_agent(), evaluation=True)) == 1
    assert not caplog.records
    assert len(load_examples(DataConfig(path=train), make_agent(), evaluation=True)) == 3
    assert "set data.eval_path" in caplog.text


def test_max_samples_takes_the_first_ones_also_of_an_endless_iterator():
    def forever(split):
        index = 0
        while True:
            yield {"id": index}
            index += 1

    examples = load_examples(DataConfig(max_samples=2), make_agent(forever))
    assert ids_of(examples) == ["0", "1"]


def test_an_endless_iterator_without_max_samples_is_refused(monkeypatch):
    monkeypatch.setattr("agentrl.data.MAX_UNSIZED_ROWS", 10)
    with pytest.raises(UsageError, match=r"went on after 10 examples: set data\.max_samples"):
        load_examples(DataConfig(), make_agent(lambda split: iter(dict, None)))


def raise_in_examples(split):
    raise RuntimeError("no tasks today")


def raise_while_iterating(split):
    yield {}
    raise RuntimeError("no tasks today")


@pytest.mark.parametrize("examples", [raise_in_examples, raise_while_iterating])
def test_what_examples_raises_is_a_usage_error_with_its_line(examples):
    with pytest.raises(UsageError, match=r"RuntimeError: no tasks today at line \d+ \(raise "):
        load_examples(DataConfig(), make_agent(examples))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "is empty: give it at least one example"),
        (None, "returned a NoneType: return a list"),
        ({"prompt": "x"}, "returned a dict: return a list"),
        ("prompts", "returned a str: return a list"),
        (["prompt"], "row 0 of examples.* is a str: every example must be a dict"),
    ],
)
def test_what_examples_may_not_return(value, message):
    with pytest.raises(UsageError, match=message):
        load_examples(DataConfig(), make_agent(lambda split: value))


def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "x"}\n', encoding="utf-8-sig")
    assert load_examples(DataConfig(path=str(path)), make_agent())[0] == ("0", {"prompt": "x"})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data.jsonl", '{"prompt": "x"}\n{"prompt": \n', "data.jsonl line 2 is not valid JSON"),
        ("data.json", '[{"prompt": ]', "data.json is not valid JSON"),
        ("data.parquet", "not parquet", "as Parquet"),
        ("data.jsonl", "\n", "data.jsonl is empty"),
        ("data.csv", "a,b", r"cannot read .*data\.csv: data\.path takes"),
        ("data.jsonl", "3\n", "row 0 of .* is a int"),
    ],
)
def test_a_bad_file_is_named_with_the_line(tmp_path: Path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=message):
        load_examples(DataConfig(path=str(tmp_path / name)), make_agent())


@pytest.mark.parametrize("path", ["nowhere.jsonl", "./nowhere", "a/b/c"])
def test_a_missing_file_is_not_looked_for_on_the_hub(path):
    with pytest.raises(UsageError, match=r"does not exist: correct data\.path"):
        load_examples(DataConfig(path=path), make_agent())


def test_no_source_at_all_names_both_remedies():
    with pytest.raises(UsageError, match=r"set data\.path, or define `examples\(split\)`"):
        load_examples(DataConfig(), make_agent())


def test_a_row_without_the_prompt_is_named_with_the_fields_that_it_has(tmp_path: Path):
    path = write_lines(tmp_path / "data.jsonl", [{"prompt": "x"}, {"question": "y", "label": 1}])
    assert len(load_examples(DataConfig(path=path), make_agent())) == 2
    with pytest.raises(
        UsageError,
        match=r"row 1 .* has no 'prompt' \(it has: question, label\): set data.prompt_key",
    ):
        load_examples(DataConfig(path=path), make_agent(needs_prompt=True))


def numbered(size: int) -> Examples:
    return Examples([{"id": index} for index in range(size)], "test")


def test_groups_count_on_over_epochs_and_no_tail_is_lost():
    cursor = ExampleCursor(numbered(5), seed=0)
    drawn = [group for _ in range(5) for group in cursor.next_groups(3, 2)]
    assert [group.group_id for group in drawn] == [f"{index:08d}" for index in range(15)]
    assert Counter(group.example_id for group in drawn) == {str(index): 3 for index in range(5)}
    epochs = [[group.example_id for group in drawn[start : start + 5]] for start in (0, 5, 10)]
    assert all(sorted(epoch) == list("01234") for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert cursor.epoch == 2


def test_a_batch_larger_than_the_data_wraps_more_than_once():
    drawn = ExampleCursor(numbered(2), seed=0).next_groups(5, 1)
    assert Counter(group.example_id for group in drawn).most_common()[0][1] == 3
    assert len({group.group_id for group in drawn}) == 5


def test_the_order_depends_on_the_seed_alone():
    def order(seed: int, shuffle: bool = True) -> list[str]:
        cursor = ExampleCursor(numbered(20), seed=seed, shuffle=shuffle)
        return [group.example_id for group in cursor.next_groups(20, 1)]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(-1) == order(-1)
    assert order(1, shuffle=False) == [str(index) for index in range(20)]


@pytest.mark.parametrize("before", [0, 3, 5, 7])
def test_a_restored_cursor_goes_on_where_the_saved_one_stood(before):
    whole = ExampleCursor(numbered(5), seed=3)
    whole.next_groups(before, 2)
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = ExampleCursor(numbered(5), seed=3)
    resumed.load_state_dict(state)
    assert resumed.next_groups(9, 2) == whole.next_groups(9, 2)


@pytest.mark.parametrize(
    ("cursor", "message"),
    [
        (ExampleCursor(numbered(6), seed=3), "the size of the data was 5 and is 6 now"),
        (ExampleCursor(numbered(5), seed=4), r"the seed .* set train\.seed"),
        (ExampleCursor(numbered(5), seed=3, shuffle=False), r"the shuffle .* set data\.shuffle"),
    ],
)
def test_a_position_in_other_data_is_refused(cursor, message):
    with pytest.raises(UsageError, match=message):
        cursor.load_state_dict(ExampleCursor(numbered(5), seed=3).state_dict())


def test_an_evaluation_takes_every_example_once_in_order():
    groups = all_groups(numbered(3), 4, prefix="eval-000002-")
    assert [group.group_id for group in groups][-1] == "eval-000002-00000002"
    assert [group.example_id for group in groups] == ["0", "1", "2"]
    assert {group.n_samples for group in groups} == {4}
