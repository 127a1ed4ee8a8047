"""Training and calibration data: what is read, how rows are packed, exact shares, exact resume, and what is refused."""

from __future__ import annotations

import json
import logging
import random
from types import SimpleNamespace

import pytest
import torch

from star_elastic.errors import CheckpointError, DataError
from star_elastic.train.data import calibration_batches, source_of, training_loader
from star_elastic.train.documents import Documents, load_tokenizer, render_chat
from star_elastic.train.files import PIECE_BYTES
from star_elastic.train.packing import Cursor, RowStream, next_row, permutation
from star_elastic.train.recipe import DataRecipe, SourceRecipe
from star_elastic.train.sources import open_source

EOS = 2
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
CHAT_WITH_THOUGHTS = "{% for m in messages %}<{{ m.role }}>[{{ m.reasoning_content }}]{{ m.content }}{% endfor %}"


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    """datasets reads its cache's place at import; tests must not write into the user's."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def tokenizer():
    """One token per byte: id = byte + 3, after <pad>, <bos>, <eos>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *alphabet])}
    fast = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


@pytest.fixture
def chatty(tokenizer):
    tokenizer.chat_template = CHAT
    yield tokenizer
    tokenizer.chat_template = None


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def source(path, **fields):
    return open_source(SourceRecipe(path=str(path), **fields))


def contents(opened):
    return [opened[index] for index in range(len(opened))]


class Lists:
    """Documents made of ready token lists."""

    def __init__(self, lists, name="lists"):
        self._lists, self.name = lists, name

    def __len__(self):
        return len(self._lists)

    def __getitem__(self, index):
        return self._lists[index]


def numbered(count, rng=None, longest=40):
    """Document i consists of tokens i * 100, i * 100 + 1, ... and ends with EOS."""
    rng = rng or random.Random(0)
    return Lists([[*range(i * 100 + 3, i * 100 + 3 + rng.randrange(1, longest)), EOS] for i in range(count)])


# Sources


def test_text_by_document_paragraph_and_line(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes("one\ntwo\n\n\nthrée\n".encode())
    assert contents(source(file)) == ["one\ntwo\n\n\nthrée\n"]
    assert contents(source(file, sample_by="line")) == ["one\n", "two\n", "thrée\n"]
    assert contents(source(file, sample_by="paragraph")) == ["one\ntwo\n\n", "thrée\n"]
    assert source(file, sample_by="line").place(2).endswith("a.txt:5")


def test_directory_and_glob_read_files_in_order(tmp_path):
    for name in ("b.txt", "a.md", "deep/c.txt", "code.py"):
        (tmp_path / "d" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "d" / name).write_text(name)
    assert contents(source(tmp_path / "d")) == ["a.md", "b.txt", "deep/c.txt"]
    assert contents(source(tmp_path / "d/**/*.py")) == ["code.py"]


def test_a_long_file_comes_in_pieces_that_together_are_the_file(tmp_path):
    lines = [f"line {i} " + "x" * 5000 + "\n" for i in range(PIECE_BYTES // 2000)]
    (tmp_path / "long.txt").write_text("".join(lines))
    pieces = contents(source(tmp_path / "long.txt"))
    assert len(pieces) == 3 and "".join(pieces) == "".join(lines)
    assert all(piece.endswith("\n") for piece in pieces)


def test_json_lines_choose_messages_over_text_and_skip_blank_lines(tmp_path):
    talk = [{"role": "user", "content": "hi"}]
    path = jsonl(tmp_path / "a.jsonl", [{"text": "x", "messages": talk, "id": 1}])
    path.write_text(path.read_text() + "\n   \n" + json.dumps({"text": "é", "messages": talk * 2}) + "\n")
    assert contents(source(path)) == [talk, talk * 2]
    assert contents(source(path, field="text")) == ["x", "é"]
    assert source(path).place(1).endswith("a.jsonl:4")


def test_parquet_and_datasets_folders(tmp_path):
    import datasets

    talk = [{"role": "user", "content": "hi", "reasoning_content": None}]
    table = datasets.Dataset.from_dict({"text": ["a", "b"], "messages": [talk, talk]})
    table.to_parquet(tmp_path / "t.parquet")
    table.save_to_disk(tmp_path / "folder")
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(tmp_path / "splits")
    assert contents(source(tmp_path / "t.parquet", field="text")) == ["a", "b"]
    assert contents(source(tmp_path / "t.parquet")) == [talk, talk]
    assert contents(source(tmp_path / "folder", field="text")) == ["a", "b"]
    assert contents(source(tmp_path / "splits", field="text", split="test")) == ["b"]
    with pytest.raises(DataError, match="no split 'tset'; did you mean 'test'"):
        source(tmp_path / "splits", split="tset")


@pytest.fixture
def hub_says(monkeypatch):
    """What the hub answers when it is asked whether it has a dataset; tests ask no real one."""
    import huggingface_hub

    def says(error=None):
        asked = []

        def dataset_info(self, name, **options):
            asked.append((name, options))
            if error is not None:
                raise error

        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
        return asked

    return says


def answer(kind, status):
    """An HTTP error as huggingface_hub raises it: a long story of several lines."""
    return kind(f"{status} Client Error.\n\nlong story", response=SimpleNamespace(status_code=status, headers={}, request=None))


def test_a_hub_name_goes_through_datasets(monkeypatch, hub_says):
    import datasets

    hub_says()
    asked = []

    def load(name, subset, **options):
        asked.append((name, subset, options))
        return datasets.Dataset.from_dict({"text": ["from the hub"]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    opened = open_source(SourceRecipe(hub="owner/name", subset="main", split="test", revision="abc"))
    assert contents(opened) == ["from the hub"] and opened.name == "hub:owner/name"
    assert asked == [("owner/name", "main", {"split": "test", "revision": "abc"})]


def test_a_name_that_the_hub_does_not_know_is_refused_by_one_question(monkeypatch, hub_says):
    import datasets
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: pytest.fail("it would try for half a minute"))
    asked = hub_says(answer(RepositoryNotFoundError, 404))
    with pytest.raises(DataError, match="hub:owner/nmae does not exist on the hub.* there is no owner/nmae on this disk$"):
        open_source(SourceRecipe(hub="owner/nmae"))
    assert [name for name, _ in asked] == ["owner/nmae"] and 0 < asked[0][1]["timeout"] <= 15
    asked = hub_says(answer(RevisionNotFoundError, 404))
    with pytest.raises(DataError, match="^hub:owner/name has no revision 'abd'$"):
        open_source(SourceRecipe(hub="owner/name", revision="abd"))
    assert asked[0][1]["revision"] == "abd"


def test_without_a_network_the_cache_is_read_at_once_and_in_silence(monkeypatch, hub_says):
    import datasets

    lines = []
    handler = logging.Handler()
    handler.emit = lines.append
    hub_says(OSError("Name or service not known"))

    def load(*args, **options):
        assert datasets.config.HF_HUB_OFFLINE  # so it does not try again
        for name in ("datasets.load", "huggingface_hub.utils._http"):
            logger = logging.getLogger(name)
            logger.addHandler(handler)
            logger.error("Retrying in 1s [Retry 1/5].")
            logger.removeHandler(handler)
        raise ConnectionError("Couldn't reach 'owner/name' on the Hub (OfflineModeIsEnabled)")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError) as caught:
        open_source(SourceRecipe(hub="owner/name"))
    assert str(caught.value) == (
        "hub:owner/name cannot be read: the hub cannot be reached, no copy is in the cache, "
        "and there is no owner/name on this disk"
    )
    assert lines == [] and not datasets.config.HF_HUB_OFFLINE
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: datasets.Dataset.from_dict({"text": ["cached"]}))
    assert contents(open_source(SourceRecipe(hub="owner/name"))) == ["cached"]


@pytest.mark.parametrize("damage", [slice(0, 2000), slice(0, 0), slice(4, None)])
def test_a_broken_parquet_is_one_line_and_nothing_else(tmp_path, capfd, damage):
    import datasets

    whole = tmp_path / "whole.parquet"
    datasets.Dataset.from_dict({"text": [f"line {i}" for i in range(2000)]}).to_parquet(whole)
    (tmp_path / "a.parquet").write_bytes(whole.read_bytes()[damage])
    capfd.readouterr()
    with pytest.raises(DataError, match=r"a\.parquet cannot be read: ") as caught:
        source(tmp_path / "a.parquet")
    assert "\n" not in str(caught.value) and capfd.readouterr() == ("", "")


def test_a_hub_that_fails_later_is_one_line(monkeypatch, hub_says):
    import datasets

    hub_says()

    def load(*args, **options):
        raise ConnectionError("Couldn't reach the hub\nlong story")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError) as caught:
        open_source(SourceRecipe(hub="owner/name"))
    assert str(caught.value) == "hub:owner/name cannot be read: Couldn't reach the hub, and there is no owner/name on this disk"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "x"}\n{"text": \n', r"a\.jsonl:2: not valid JSON"),
        ("a.jsonl", '{"text": "x"}\n[1]\n', r"a\.jsonl:2: holds a JSON list"),
        ("a.jsonl", '{"text": "x"}\n{"txt": "y"}\n', r"a\.jsonl:2: no field 'text'; did you mean 'txt'"),
        ("a.jsonl", '{"prompt": "x"}\n', r"a\.jsonl:1: neither 'messages' nor 'text'; name the field: one of prompt"),
        ("a.jsonl", '{"text": 3}\n', r"a\.jsonl:1: field 'text' holds int; it must be text"),
        ("a.jsonl", '{"messages": "hi"}\n', r"a\.jsonl:1: field 'messages' holds str; it must be a list of messages$"),
        (
            "a.jsonl",
            '{"messages": []}\n{"messages": [{"role": "user", "content": 3}]}\n',
            r"a\.jsonl:2: field 'messages': 'content' of a message must be text, not int$",
        ),
        (
            "a.jsonl",
            '{"messages": [{"role": "user", "content": "x", "thinking": ["y"]}]}\n',
            r"a\.jsonl:1: field 'messages': 'thinking' of a message must be text, not list$",
        ),
        ("a.jsonl", '{"messages": [{"content": "x"}]}\n', r"a\.jsonl:1: field 'messages': a message must be .* 'role'"),
        ("a.jsonl", '{"text": ""}\n{"text": "  "}\n{"text": null}\n', r"a\.jsonl holds no text: 3 documents, all empty"),
        ("a.jsonl", "", r"a\.jsonl holds no text: 0 documents"),
        ("a.txt", " \n\n", r"a\.txt holds no text"),
        ("a.txt", b"caf\xe9", r"a\.txt is not UTF-8 text"),
        ("a.parquet", "not parquet", r"a\.parquet cannot be read"),
        (
            "a.jsonl",
            r'{"text": "\ud83d\ude00 whole"}' + "\n" + r'{"text": "\ud83d abc"}',
            r"a\.jsonl:2: field 'text': not valid Unicode text",
        ),
        (
            "a.jsonl",
            r'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "\ude00"}]}',
            r"a\.jsonl:1: field 'messages': not valid Unicode text",
        ),
        (
            "a.jsonl",
            r'{"messages": [{"role": "user", "content": "x", "tool_calls": [{"name": "\ud83d"}]}]}',
            r"a\.jsonl:1: field 'messages': not valid Unicode text",
        ),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message) as caught:
        source(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_parquet_whose_text_is_not_unicode_is_told_with_its_row(tmp_path):
    import pyarrow
    from pyarrow.parquet import write_table

    spans = pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0\4\0\0\0")  # "x", and half a surrogate pair in three bytes
    text = pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, spans, pyarrow.py_buffer(b"x\xed\xa0\xbd")])
    write_table(pyarrow.table({"text": text}), tmp_path / "a.parquet")
    opened = source(tmp_path / "a.parquet")
    assert opened[0] == "x"
    with pytest.raises(DataError, match=r"a\.parquet: row 1: field 'text': not valid Unicode text$"):
        opened[1]


def test_parquet_files_without_rows(tmp_path):
    import datasets

    datasets.Dataset.from_dict({"text": ["x"]}).to_parquet(tmp_path / "b.parquet")
    datasets.Dataset.from_dict({"text": ["x"]}).select([]).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet cannot be read: it has no rows$"):
        source(tmp_path / "a.parquet")
    assert contents(source(tmp_path / "*.parquet")) == ["x"]


def test_missing_and_mixed_files_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"data /dev/null is no regular file; save its content to one$"):
        source("/dev/null")
    with pytest.raises(DataError, match="does not exist"):
        source(tmp_path / "nothing.txt")
    with pytest.raises(DataError, match="does not exist"):
        source(tmp_path / "*.txt")
    (tmp_path / "a.txt").write_text("x")
    jsonl(tmp_path / "b.jsonl", [{"text": "x"}])
    with pytest.raises(DataError, match="mixes jsonl, text files"):
        source(tmp_path / "*.*")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"holds no \.txt, \.md, \.rst file"):
        source(tmp_path / "empty")


def test_numbers_in_a_table_are_no_text_and_text_is_no_conversation(tmp_path):
    import datasets

    datasets.Dataset.from_dict({"text": [0, 1], "messages": ["", "hi"]}).save_to_disk(tmp_path / "folder")
    with pytest.raises(DataError, match="folder: row 0: field 'text' holds int; it must be text"):
        source(tmp_path / "folder", field="text")
    with pytest.raises(DataError, match="folder: row 0: field 'messages' holds str; it must be a list of messages"):
        source(tmp_path / "folder")


def test_a_missing_column_of_a_table_is_named(tmp_path):
    import datasets

    datasets.Dataset.from_dict({"prompt": ["a"]}).save_to_disk(tmp_path / "folder")
    with pytest.raises(DataError, match="name the field: one of prompt"):
        source(tmp_path / "folder")
    with pytest.raises(DataError, match="no field 'promt'; did you mean 'prompt'"):
        source(tmp_path / "folder", field="promt")


# Documents


def test_documents_end_with_one_eos_and_empty_ones_give_nothing(tmp_path, tokenizer):
    path = jsonl(tmp_path / "a.jsonl", [{"text": "ab"}, {"text": " "}, {"text": "c<eos>"}])
    documents = Documents(source(path), tokenizer)
    a, b, c = (tokenizer.convert_tokens_to_ids(letter) for letter in "abc")
    assert [documents[i] for i in range(3)] == [[a, b, EOS], [], [c, EOS]]


def thoughtful(key="reasoning_content", thoughts="hm"):
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", key: thoughts}]


@pytest.mark.parametrize("key", ["reasoning_content", "thinking"])
def test_thoughts_stand_before_the_content_where_the_template_reads_none(chatty, key):
    assert render_chat(thoughtful(key), chatty) == "<user>q<assistant><think>\nhm\n</think>\n\na"
    assert render_chat(thoughtful(key, " "), chatty) == "<user>q<assistant>a"


@pytest.mark.parametrize("key", ["reasoning_content", "thinking"])
def test_thoughts_go_to_the_template_under_the_name_it_reads(chatty, key):
    chatty.chat_template = CHAT_WITH_THOUGHTS
    assert render_chat(thoughtful(key), chatty) == "<user>[]q<assistant>[hm]a"
    chatty.chat_template = CHAT_WITH_THOUGHTS.replace(".reasoning_content", "['thinking']")
    assert render_chat(thoughtful(key), chatty) == "<user>[]q<assistant>[hm]a"


def test_a_switch_called_enable_thinking_is_no_place_for_thoughts(chatty):
    chatty.chat_template = "{% if enable_thinking %}!{% endif %}" + CHAT
    assert "<think>\nhm\n</think>" in render_chat(thoughtful(), chatty)


def test_a_conversation_without_a_template_and_one_it_refuses_are_told_with_their_place(tmp_path, tokenizer, chatty):
    path = jsonl(tmp_path / "chat.jsonl", [{"messages": thoughtful()}])
    documents = Documents(source(path), tokenizer)
    chatty.chat_template = None
    with pytest.raises(DataError, match=r"chat\.jsonl:1: a conversation needs a chat template and the tokenizer has none"):
        documents[0]
    chatty.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"chat\.jsonl:1: the chat template refuses the conversation: roles must alternate"):
        documents[0]


def test_a_tokenizer_that_is_missing_or_has_no_end(tmp_path, tokenizer):
    with pytest.raises(CheckpointError, match="holds no tokenizer: copy tokenizer.json and its companions there$"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"holds no tokenizer that can be read: .*[^:\s]$"):
        load_tokenizer(tmp_path)
    tokenizer.save_pretrained(tmp_path / "good")
    assert load_tokenizer(tmp_path / "good").eos_token_id == EOS
    config = json.loads((tmp_path / "good/tokenizer_config.json").read_text())
    del config["eos_token"]
    (tmp_path / "good/tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="no end-of-sequence token"):
        load_tokenizer(tmp_path / "good")


# Rows


def test_crossing_rows_are_the_shuffled_documents_end_to_end():
    documents, length = numbered(12), 16
    cursor = Cursor(documents, "s")
    rows = [next_row(cursor, length, "cross") for _ in range(30)]
    assert all(len(row) == length for row in rows)
    stream = [token for row in rows for token in row]
    order = [i for epoch in range(9) for i in permutation(12, f"s/epoch {epoch}").tolist()]
    expected = [token for i in order for token in documents[i]]
    assert stream == expected[: len(stream)]
    assert len(stream) > sum(map(len, contents(documents)))  # it went into a second epoch


def test_rows_apart_never_hold_two_documents_and_lose_nothing():
    documents, length = numbered(12), 16
    cursor = Cursor(documents, "s")
    rows = []
    while cursor.position.epoch == 0:
        rows.append(next_row(cursor, length, "apart"))
    assert all(0 < len(row) <= length for row in rows)
    for row in rows:
        assert len({token // 100 for token in row if token != EOS}) <= 1
        assert EOS not in row[:-1]
    assert sorted(t for row in rows for t in row) == sorted(t for document in contents(documents) for t in document)


@pytest.mark.parametrize("packing", ["cross", "apart"])
def test_epochs_differ_in_order_and_blocks_stay_within_an_epoch(packing):
    documents = numbered(12)
    stream = RowStream(documents, 16, packing, block=10_000, seed="s")
    first = [next(stream) for _ in range(12)]
    again = RowStream(documents, 16, packing, block=10_000, seed="s")
    assert [next(again) for _ in range(12)] == first
    other = RowStream(documents, 16, packing, block=10_000, seed="t")
    assert [next(other) for _ in range(12)] != first


def test_blocks_shuffle_windows_of_one_long_document():
    documents = Lists([list(range(1, 1601))])
    stream = RowStream(documents, 16, "cross", block=50, seed="s")
    starts = [next(stream)[0] for _ in range(100)]
    assert sorted(starts) == list(range(1, 1601, 16))
    assert starts[:50] != sorted(starts[:50]) and max(starts[:50]) < 801  # each block is shuffled by itself


def test_documents_without_tokens_are_an_error_and_not_an_endless_loop():
    with pytest.raises(DataError, match="gives no tokens"):
        next(RowStream(Lists([[], []]), 16, "cross", 4, "s"))


@pytest.mark.parametrize("packing", ["cross", "apart"])
@pytest.mark.parametrize("block", [1, 7, 1000])
def test_a_stream_resumes_anywhere(packing, block):
    documents = numbered(9)
    stream = RowStream(documents, 16, packing, block, "s")
    for taken in range(40):
        state = json.loads(json.dumps(stream.state()))
        fresh = RowStream(documents, 16, packing, block, "s")
        fresh.restore(state)
        assert [next(fresh) for _ in range(12)] == peek(stream, documents, packing, block, taken, 12)
        next(stream)


def peek(stream, documents, packing, block, taken, count):
    """The next rows by counting from the start, the slow and certain way."""
    again = RowStream(documents, 16, packing, block, "s")
    return [next(again) for _ in range(taken + count)][taken:]


def test_resuming_with_other_data_is_refused():
    stream = RowStream(numbered(9), 16, "cross", 4, "s")
    next(stream)
    with pytest.raises(DataError, match="lists has 8 documents, but the run began with 9"):
        RowStream(numbered(8), 16, "cross", 4, "s").restore(stream.state())


# Mixture and loader


def loader_of(documents, packing="cross", batch_size=4, **fields):
    kinds = ["reasoning", "text", "text"]
    sources = [{"path": f"{i}", "kind": kinds[i]} for i in range(len(documents))]
    recipe = DataRecipe(sources=sources, packing=packing, shuffle_tokens=64, **fields)
    return training_loader(documents, recipe, length=16, batch_size=batch_size, seed=0, pad=0)


def three_sources():
    """Tokens of source i lie in [10,000 i, 10,000 (i + 1))."""
    base = numbered(20)
    return [Lists([[token + 10_000 * i for token in doc] for doc in contents(base)]) for i in range(3)]


@pytest.mark.parametrize("packing", ["cross", "apart"])
def test_shares_of_tokens_hold_at_every_moment(packing):
    batches = iter(loader_of(three_sources(), packing))
    seen = [0, 0, 0]
    for step in range(60):
        batch = next(batches)
        for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            seen[int(row[0]) // 10_000] += int(mask.sum())
        if step > 3:
            # No source is further from its share than one row.
            for count, share in zip(seen, (0.7, 0.15, 0.15), strict=True):
                assert abs(count - share * sum(seen)) <= 16


def test_padding_is_on_the_right_and_masked():
    batch = next(iter(loader_of([Lists([[5, 6, EOS], [7, 8, 9, 10, EOS]])], "apart", batch_size=2)))
    assert batch["input_ids"].dtype == torch.int64
    rows = sorted(zip(batch["input_ids"].tolist(), batch["attention_mask"].tolist(), strict=True))
    assert rows == [([5, 6, EOS, 0, 0], [1, 1, 1, 0, 0]), ([7, 8, 9, 10, EOS], [1, 1, 1, 1, 1])]


@pytest.mark.parametrize("packing", ["cross", "apart"])
def test_the_loader_resumes_exactly_and_leaves_global_randomness_alone(packing):
    loader = loader_of(three_sources(), packing)
    batches = iter(loader)
    for _ in range(7):
        next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    before = torch.get_rng_state()
    fresh = loader_of(three_sources(), packing)
    fresh.load_state_dict(state)
    resumed = iter(fresh)
    for _ in range(20):
        expected, got = next(batches), next(resumed)
        assert torch.equal(expected["input_ids"], got["input_ids"])
        assert torch.equal(expected["attention_mask"], got["attention_mask"])
    assert torch.equal(before, torch.get_rng_state())


# Calibration


def test_calibration_is_deterministic_and_ends_with_the_data(tmp_path, tokenizer):
    path = jsonl(tmp_path / "a.jsonl", [{"text": f"document number {i}"} for i in range(10)])
    options = {"samples": 5, "seq_len": 16, "batch_size": 2}
    one, two = (calibration_batches(path, tokenizer, **options) for _ in range(2))
    assert [tuple(batch["input_ids"].shape) for batch in one] == [(2, 16), (2, 16), (1, 16)]
    assert one.sha256 == two.sha256 and one.tokens == 80
    assert calibration_batches(path, tokenizer, seed=1, **options).sha256 != one.sha256

    everything = calibration_batches(path, tokenizer, samples=10_000, seq_len=16, batch_size=4)
    real = torch.cat([batch["input_ids"][batch["attention_mask"] == 1] for batch in everything])
    assert everything.tokens == len(real) == sum(len(f"document number {i}") + 1 for i in range(10))
    assert int((real == EOS).sum()) == 10


def test_calibration_rows_can_stay_apart(tmp_path, tokenizer):
    path = jsonl(tmp_path / "a.jsonl", [{"text": "x" * n} for n in (3, 20)])
    got = calibration_batches(path, tokenizer, samples=10, seq_len=16, packing="apart", batch_size=10)
    lengths = sorted(got.batches[0]["attention_mask"].sum(1).tolist())
    assert got.samples == 3 and lengths == [4, 5, 16]


def test_calibration_of_a_mixture_keeps_shares_until_a_source_ends(tmp_path, tokenizer):
    a = jsonl(tmp_path / "a.jsonl", [{"text": "a" * 15}] * 100)
    b = jsonl(tmp_path / "b.jsonl", [{"text": "b" * 15}] * 6)
    recipe = DataRecipe(sources=[{"path": str(a), "kind": "reasoning"}, {"path": str(b)}])
    got = calibration_batches(recipe, tokenizer, samples=40, seq_len=16)
    letters = [tokenizer.convert_ids_to_tokens(int(batch["input_ids"][0, 0])) for batch in got]
    assert letters[:20].count("a") == 14 and letters.count("b") == 6 and len(letters) == 40


def test_empty_calibration_data_is_refused(tmp_path, tokenizer):
    with pytest.raises(DataError, match="holds no text"):
        calibration_batches(jsonl(tmp_path / "a.jsonl", [{"text": ""}]), tokenizer, samples=4, seq_len=8)


def test_what_a_word_of_data_means(tmp_path):
    for empty in ("", " "):
        with pytest.raises(DataError, match="the name of the data is empty: give a file"):
            source_of(empty)
    (tmp_path / "here").mkdir()
    assert source_of(tmp_path / "here").path == str(tmp_path / "here")
    assert source_of("books/*.txt").path == "books/*.txt"
    assert source_of("missing.jsonl").path == "missing.jsonl"
    assert source_of("./owner/name").path == "owner/name"
    assert source_of("owner/name").hub == "owner/name"
