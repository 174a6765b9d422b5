"""`prepare --chat`: ids and targets against transformers and by hand, through the corpus to the loss."""

import json
import random
import re
from pathlib import Path

import pytest
import torch
from checkpoints import flip_bit
from made_corpora import Killed, kill_at, read_folder
from test_tokenizer_json import EOS, IM_END, sentencepiece, train, write_json  # noqa: F401
from torchtitan_lite.data.vocabulary import VocabularyError
from two_steps import make_two_steps

from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.reader import REPOSITORY
from torchtitan_lite.data import shards
from torchtitan_lite.data.corpus import open_corpus
from torchtitan_lite.data.corpus_folder import CorpusError, read_manifest
from torchtitan_lite.data.dataset import SampleReader, SampleStream
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.model.head import IGNORE_INDEX
from torchtitan_lite.model.llama3 import Llama3
from torchtitan_lite.tools.corpora import command as tool
from torchtitan_lite.tools.corpora.chat import LLAMA_3, ChatFormat, read_chat_format

SHIPPED = str(REPOSITORY / "assets" / "tokenizer")
TALK = [
    {"role": "system", "content": " Be brief.\n"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "naïve 😀?"},
    {"role": "assistant", "content": "é, def f(x):\n    return 😀"},
]
# ChatML without marks, and with marks; the answer starts after a line end, and may begin with one
PLAIN = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '"
    + IM_END
    + "\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{{- bos_token }}{%- for message in messages %}\n    <|im_start|>{{ message.role }}\n"
    "    {%- if message.role == 'assistant' -%}\n        {%- generation -%} {{- message.content + '"
    + IM_END
    + "' -}}\n"
    "    {% endgeneration %}\n{%- else %}\n{{ message.content | tojson }}" + IM_END + "\n{% endif %}\n{%- endfor %}"
)


def draw_talks(n: int) -> list[list[dict]]:
    draw, talks = random.Random(0), [TALK]
    pieces = ["alpha", " beta", "\n", "\n\n  ", "é", "😀", "日本", "x = 1", "'ll", " ", "e\u0301", "12345"]
    for _ in range(n):
        talk = [{"role": "system", "content": "sys"}] * draw.randrange(2)
        for _ in range(draw.randrange(1, 4)):
            texts = ["".join(draw.choices(pieces, k=draw.randrange(1, 12))) for _ in range(2)]
            talk += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]
        talks.append(talk)
    return talks


# ---------------------------------------------------------------- one conversation


def test_without_a_template_it_is_llama_3s_format_and_the_targets_are_the_assistants_text_and_its_end():
    tokenizer = load_tokenizer(SHIPPED)
    special = {token.text: token.id for token in tokenizer.vocabulary.added}
    begin, start, end, turn = (
        special[f"<|{name}|>"] for name in ("begin_of_text", "start_header_id", "end_header_id", "eot_id")
    )
    ids, targets = [begin], [0]
    for message in TALK:
        head = [start, *tokenizer.encode(message["role"]), end, *tokenizer.encode("\n\n")]
        body = [*tokenizer.encode(message["content"].strip()), turn]
        ids += head + body
        targets += [0] * len(head) + [int(message["role"] == "assistant")] * len(body)
    conversation = read_chat_format(tokenizer.vocabulary).render(TALK)
    assert tokenizer.encode_spelled(conversation.text, conversation.turns) == (ids, bytes(targets))


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["a plain template", "a marked template"])
@pytest.mark.parametrize("style", ["GPT-2", "Llama 3", "Qwen", "both kinds", "SmolLM", "sentencepiece"])
def test_ids_and_targets_are_those_of_transformers(tmp_path, request, style, template):
    transformers = pytest.importorskip("transformers", reason="only an oracle")
    content = request.getfixturevalue("sentencepiece") if style == "sentencepiece" else train(style)
    folder = write_json(tmp_path, content)
    oracle = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token=EOS, bos_token=EOS
    )
    oracle.add_special_tokens({"additional_special_tokens": ["<|im_start|>", IM_END]})
    oracle.chat_template = template
    oracle.save_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    chat = read_chat_format(tokenizer.vocabulary)
    assert chat.template == template
    for talk in draw_talks(30):
        conversation = chat.render(talk)
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": template == MARKED}
        expected = oracle.apply_chat_template(talk, **options)
        ids, targets = tokenizer.encode_spelled(conversation.text, conversation.turns)
        assert ids == expected["input_ids"]
        if template == MARKED:
            assert list(targets) == expected["assistant_masks"]
            continue
        text = oracle.apply_chat_template(talk, tokenize=False)
        assert text == conversation.text
        answers, at = [False] * len(text), 0  # of each character
        for message in talk:
            body = f"{message['content']}{IM_END}\n"
            at += len(f"<|im_start|>{message['role']}\n") + len(body)
            answers[at - len(body) : at] = [message["role"] == "assistant"] * len(body)
        spans = oracle(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        assert list(targets) == [int(any(answers[start:stop])) for start, stop in spans]
    assert tokenizer.eos_id not in tokenizer.encode(f"a{EOS}b")  # elsewhere it stays plain text
    if style == "Qwen":  # NFC joins what a turn begins with to the text before it
        with pytest.raises(ValueError, match="bytes of its text"):
            tokenizer.encode_spelled("e\u0301", [(1, 2)])


REFUSED = {  # what is wrong -> the conversation, a word of the reason
    "text": ("hello", "no list of messages"),
    "nothing": ([], "no list of messages"),
    "no role": ([{"content": "x"}], "message 1"),
    "null content": ([TALK[0], {"role": "assistant", "content": None}], "message 2"),
    "a list of texts": (["x"], "message 1"),
    "no assistant": (TALK[:2], "no turn of an assistant"),
    "a special token": ([TALK[1], {"role": "assistant", "content": "no<|eot_id|>yes"}], "<|eot_id|>"),
    "a special token as a role": ([{"role": "<|eot_id|>", "content": "x"}, TALK[2]], "<|eot_id|>"),
    "the mark of a turn's end": ([TALK[1], {"role": "assistant", "content": "no\ufdd1yes"}], "ufdd1"),
    "half of a character": ([TALK[1], {"role": "assistant", "content": "\ud800"}], "surrogates"),
    "too long": ([TALK[1], {"role": "assistant", "content": "x" * 400_000}], "longer than"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_conversation_is_named_with_its_line_and_left_out_with_skip_bad(tmp_path, capsys, case):
    messages, why = REFUSED[case]
    write_talks(tmp_path / "in.jsonl", [TALK, messages])
    assert prepare_chat(tmp_path) == 2
    error = capsys.readouterr().err
    assert "in.jsonl, line 2" in error and why in error and not (tmp_path / "out").exists()
    assert prepare_chat(tmp_path, "--skip-bad", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    ((ids, targets),) = encode_talks([TALK])
    assert (found["documents"], found["n_bad_lines"], found["n_targets"]) == (1, 1, sum(targets))
    (shard,) = read_manifest(tmp_path / "out").splits["train"]
    assert shard.n_text_bytes == len(load_tokenizer(SHIPPED).decode(ids).encode())
    (tmp_path / "in.jsonl").write_text(json.dumps({"talk": TALK, "messages": messages}))
    assert prepare_chat(tmp_path, "--overwrite", "--text-column", "talk") == 0


TEMPLATES = {  # a template -> a word of what is said of it
    "{% for message in messages %}{{ message.content }}{% if loop.last %}!{% endif %}{% endfor %}": "{% generation %}",
    "{% for message in messages %}{{ message.content }}{% endfor %}{{ '>' if add_generation_prompt }}": "its prompt",
    "a{% generation %}{% endgeneration %}": "no turn of an assistant",
    "{{ raise_exception('no system message') }}": "no system message",
    "{{ ''.__class__.__mro__ }}": "unsafe",
    "{{ messages.append(1) }}": "unsafe",
    "{{ messages[9].content }}": "no element 9",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_that_does_not_write_the_conversation_says_why(template):
    with pytest.raises(ValueError, match=re.escape(TEMPLATES[template])):
        ChatFormat(template, (), ()).render(TALK)


def write_model(folder: Path, *, template: str = "", name: str = "chat_template.jinja") -> Path:
    """A folder with the shipped tokenizer, and this template beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(Path(SHIPPED, "tokenizer.model").read_bytes())
    if template:
        (folder / name).write_text(template if name.endswith(".jinja") else json.dumps({"chat_template": template}))
    return folder


def test_the_template_is_that_of_its_own_file_then_of_the_config_then_llama_3s(tmp_path):
    def read_template() -> str:
        return read_chat_format(load_tokenizer(tmp_path).vocabulary).template

    write_model(tmp_path)
    assert read_template() == LLAMA_3
    config = tmp_path / "tokenizer_config.json"
    config.write_text(
        json.dumps({"chat_template": [{"name": "tools", "template": "a"}, {"name": "default", "template": "b"}]})
    )
    assert read_template() == "b"
    config.write_text(json.dumps({"chat_template": "c"}))
    assert read_template() == "c"
    (tmp_path / "chat_template.jinja").write_text("d")
    assert read_template() == "d"
    formats = [ChatFormat("d", names, ()) for names in ((), (("bos_token", "a"),))]
    assert formats[0].identity != formats[1].identity, "a template writes its tokens too"


@pytest.mark.parametrize("template", ["{% if %}", "{% nonsense %}"])
def test_a_template_that_is_none_is_refused_before_anything_is_read(tmp_path, capsys, template):
    write_talks(tmp_path / "in.jsonl", [TALK])
    assert prepare_chat(tmp_path, "--tokenizer", str(write_model(tmp_path / "model", template=template))) == 2
    assert "chat template" in capsys.readouterr().err and not (tmp_path / "out.unfinished").exists()


def test_chat_without_a_format_without_jinja2_or_of_plain_text_is_refused(tmp_path, capsys, monkeypatch):
    write_talks(tmp_path / "in.jsonl", [TALK])
    assert prepare_chat(tmp_path, "--tokenizer", "bytes") == 2 and "--chat" in capsys.readouterr().err
    (tmp_path / "gpt2").mkdir()
    with pytest.raises(VocabularyError, match="<|start_header_id|>"):
        read_chat_format(load_tokenizer(write_json(tmp_path / "gpt2", train("GPT-2"))).vocabulary)
    with monkeypatch.context() as patches:
        patches.setattr("torchtitan_lite.tools.corpora.chat.find_spec", lambda package: None)
        assert prepare_chat(tmp_path) == 2 and "`data`" in capsys.readouterr().err
    (tmp_path / "in.jsonl").rename(tmp_path / "in.txt")
    assert tool.main(["--chat", str(tmp_path / "in.txt"), "--out", str(tmp_path / "out")]) == 2
    assert "in.txt" in capsys.readouterr().err


# ---------------------------------------------------------------- a corpus of them


def write_talks(path: Path, talks: list) -> None:
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))


def prepare_chat(folder: Path, *more: str) -> int:
    command = [str(folder / "in.jsonl"), "--chat", "--out", str(folder / "out"), "--processes", "1", "--held-out", "0"]
    return tool.main([*command, *more])


def read_rows(folder: Path, seq_len: int, **options):
    corpus = open_corpus(str(folder), load_tokenizer(SHIPPED), Path("nowhere"))
    reader = SampleReader([corpus], seq_len, 2304, **options)
    return reader.read([(0, sample) for sample in range(reader.n_samples[0])])


def encode_talks(talks: list) -> list[tuple[list[int], bytes]]:
    tokenizer = load_tokenizer(SHIPPED)
    chat = read_chat_format(tokenizer.vocabulary)
    rendered = [chat.render(talk) for talk in talks]
    return [tokenizer.encode_spelled(conversation.text, conversation.turns) for conversation in rendered]


@pytest.fixture
def talks(tmp_path, monkeypatch) -> list:
    monkeypatch.setattr(shards, "SMALLEST_UNIT_BYTES", 800)
    talks = draw_talks(40)
    write_talks(tmp_path / "in.jsonl", talks)
    assert prepare_chat(tmp_path) == 0
    assert len(read_manifest(tmp_path / "out").splits["train"]) > 5
    return talks


def test_every_token_of_the_assistant_is_a_target_once_and_no_other_is_across_samples_and_shards(tmp_path, talks):
    pairs = [pair for ids, targets in encode_talks(talks) for pair in zip(ids, targets, strict=True)]
    for seq_len in (7, 64):
        batch = read_rows(tmp_path / "out", seq_len, restart_positions=True)
        flat = batch.targets.flatten()[: len(pairs) - 1].tolist()
        assert flat == [id if target else IGNORE_INDEX for id, target in pairs[1:]]
        assert batch.tokens.flatten()[: len(pairs) - 1].tolist() == [id for id, _ in pairs[:-1]]
        begins = [0] + [len(ids) for ids, _ in encode_talks(talks)]
        assert batch.positions.flatten()[torch.tensor(begins).cumsum(0)[1:-1]].sum() == 0  # restart with each document


def test_the_loss_of_a_masked_corpus_is_the_mean_over_the_assistants_tokens(tmp_path, talks):
    torch.manual_seed(0)
    args = ModelArgs(dim=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, ffn_dim=32, vocab_size=2304)
    model = Llama3(args)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    batch = read_rows(tmp_path / "out", 50)
    total = model(batch.tokens, positions=batch.positions, doc_ids=batch.doc_ids, targets=batch.targets)
    logits = model(batch.tokens, positions=batch.positions, doc_ids=batch.doc_ids).flatten(0, 1).log_softmax(-1)
    pairs = [pair for ids, targets in encode_talks(talks) for pair in zip(ids, targets, strict=True)]
    by_hand = [-logits[n, id] for n, (id, target) in enumerate(pairs[1:]) if target]
    assert torch.count_nonzero(batch.targets != IGNORE_INDEX) == len(by_hand) > 100
    torch.testing.assert_close(total, torch.stack(by_hand).sum(), rtol=1e-5, atol=0)


def test_a_kill_at_any_instant_continues_to_the_same_bytes(tmp_path, talks, monkeypatch):
    expected = read_folder(tmp_path / "out")
    assert sum(name.endswith(".targets") for name in expected) > 5
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "in.jsonl").write_bytes((tmp_path / "in.jsonl").read_bytes())
    for operation in range(0, 200, 9):
        with monkeypatch.context() as patches:
            kill_at(operation, patches)
            try:
                prepare_chat(tmp_path / "again")
            except Killed:
                continue
        break
    else:
        prepare_chat(tmp_path / "again")
    found = read_folder(tmp_path / "again" / "out")
    assert {name: content for name, content in found.items() if "tokens" in name or "targets" in name} == {
        name: content for name, content in expected.items() if "tokens" in name or "targets" in name
    }


def test_another_template_is_another_corpus_and_cannot_continue_it(tmp_path, talks, capsys, monkeypatch):
    def fingerprint(folder: Path) -> dict:
        corpus = open_corpus(str(folder), load_tokenizer(SHIPPED), Path("nowhere"))
        return SampleStream(SampleReader([corpus], 32, 2304), global_batch_size=2, seed=0).fingerprint

    before = fingerprint(tmp_path / "out")
    of_users = LLAMA_3.replace("'assistant'", "'user'")
    model = ["--tokenizer", str(write_model(tmp_path / "model", template=of_users))]
    with monkeypatch.context() as patches:
        kill_at(30, patches)
        with pytest.raises(Killed):
            prepare_chat(tmp_path, "--overwrite")
    assert prepare_chat(tmp_path, "--overwrite", *model) == 2 and "chat" in capsys.readouterr().err
    assert prepare_chat(tmp_path, "--overwrite", "--start-over", *model) == 0
    assert fingerprint(tmp_path / "out") != before  # the same tokens, other targets


def test_damage_of_the_targets_is_named(tmp_path, talks):
    path = tmp_path / "out" / "train-00002.targets"
    flip_bit(path, 3)
    assert tool.main(["--check", str(tmp_path / "out")]) == 1
    with pytest.raises(CorpusError, match=path.name):
        open_corpus(str(tmp_path / "out"), load_tokenizer(SHIPPED), Path("nowhere"))
    path.unlink()
    with pytest.raises(CorpusError, match=path.name):
        read_manifest(tmp_path / "out")


def test_parquet_gives_the_same_corpus(tmp_path, talks):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is in the extra `data`")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"messages": talks}), tmp_path / "in.parquet")
    out = tmp_path / "from_parquet"
    assert tool.main(["--chat", str(tmp_path / "in.parquet"), "--out", str(out), "--held-out", "0"]) == 0
    both = [read_rows(folder, 64) for folder in (tmp_path / "out", out)]
    assert torch.equal(both[0].tokens, both[1].tokens) and torch.equal(both[0].targets, both[1].targets)


def test_a_run_trains_on_conversations_also_in_a_step_without_a_target(tmp_path):
    talk = [{"role": "user", "content": "tell me more " * 3000}, {"role": "assistant", "content": "no"}]
    write_talks(tmp_path / "in.jsonl", [talk] * 3)
    assert prepare_chat(tmp_path) == 0
    args = ["--config=debug", f"--training.dataset={tmp_path / 'out'}", f"--job.dump_folder={tmp_path / 'run'}"]
    args += ["--validation.no_enable", "--training.local_batch_size=1", "--training.seq_len=32", "--metrics.log_freq=1"]
    assert make_two_steps(args, tmp_path / "log") == (2, "stopped"), (tmp_path / "log").read_text()
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(step["loss"], step["grad_norm"]) for step in logged] == [(0.0, 0.0)] * len(logged)
