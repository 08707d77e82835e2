"""LongBench (arXiv:2308.14508) and LongBench-E: JSONL files of one data set each.

Fields: input, context, answers, length, dataset, language, all_classes, _id. Scorers and answer
lengths are the published ones of each data set; one that is not LongBench's own is scored by F1
(as classes, if it has any) and answered in 64 tokens.

The published prompts are in the benchmark's own `dataset2prompt.json` and `dataset2maxlen.json`.
They are used where they lie beside the data, or in a folder `config` in the data's folder or
beside it; else a prompt of our own is, whose scores compare settings but not papers. The tag
`template` tells which. The tag `chat` is "no" where LongBench uses no chat template at all.
"""

# ruff: noqa: RUF001 - Chinese prompts have Chinese punctuation

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvsieve.evals.example import Example
from kvsieve.evals.files.format import DEFAULT_LIMITS, Format, Limits
from kvsieve.evals.files.jsonl import Build, load_examples
from kvsieve.evals.files.problems import Problems
from kvsieve.evals.files.record import Record, Tags, kind
from kvsieve.evals.files.template import Template

PROMPTS, LENGTHS = "dataset2prompt.json", "dataset2maxlen.json"


@dataclass(frozen=True)
class Dataset:
    """How a data set is asked and judged.

    Attributes:
        scorer: The published metric.
        max_tokens: The published length of an answer, in tokens.
        template: Key of `GENERIC`.
        has_chat: False for the few-shot and code sets, which LongBench sends without a chat
            template even to chat models.
    """

    scorer: str
    max_tokens: int
    template: str = "question"
    has_chat: bool = True


_GENERIC_TEXTS = {
    "question": "{context}\n\nGive the shortest answer that the text above supports.\n"
    "Question: {input}\nAnswer:",
    "question_zh": "{context}\n\n根据上文，用最少的字作答。\n问题：{input}\n答案：",
    "query": "{context}\n\nAbout the text above: {input}\nAnswer:",
    "summary": "{context}\n\nSum up the text above in about one page.\nSummary:",
    "summary_zh": "{context}\n\n请概括上文。\n概括：",
    "examples": "{context}\n{input}",
    "retrieval": "{context}\n\nOne of the paragraphs above is described here:\n{input}\n"
    "Which one? Answer like this: Paragraph 1.\nAnswer:",
    "retrieval_zh": "{context}\n\n上面有一段的内容如下：\n{input}\n"
    "是哪一段？回答如：段落1。\n答案：",
    "count": "{context}\n\nSome of the paragraphs above occur more than once. How many different "
    "ones are there? Answer with the number alone.\nAnswer:",
    "code": "{context}{input}",
}
GENERIC = {name: Template.parse(text) for name, text in _GENERIC_TEXTS.items()}
"""Prompts of our own."""

DATASETS = {
    "narrativeqa": Dataset("f1", 128),
    "qasper": Dataset("f1", 128),
    "multifieldqa_en": Dataset("f1", 64),
    "multifieldqa_zh": Dataset("f1_zh", 64, "question_zh"),
    "hotpotqa": Dataset("f1", 32),
    "2wikimqa": Dataset("f1", 32),
    "musique": Dataset("f1", 32),
    "dureader": Dataset("rouge_l_zh", 128, "question_zh"),
    "gov_report": Dataset("rouge_l", 512, "summary"),
    "qmsum": Dataset("rouge_l", 512, "query"),
    "multi_news": Dataset("rouge_l", 512, "summary"),
    "vcsum": Dataset("rouge_l_zh", 512, "summary_zh"),
    "trec": Dataset("classification", 64, "examples", has_chat=False),
    "triviaqa": Dataset("f1_first_line", 32, "examples", has_chat=False),
    "samsum": Dataset("rouge_l_first_line", 128, "examples", has_chat=False),
    "lsht": Dataset("classification", 64, "examples", has_chat=False),
    "passage_count": Dataset("count", 32, "count"),
    "passage_retrieval_en": Dataset("retrieval", 32, "retrieval"),
    "passage_retrieval_zh": Dataset("retrieval", 32, "retrieval_zh"),
    "lcc": Dataset("code_sim", 64, "code", has_chat=False),
    "repobench-p": Dataset("code_sim", 64, "code", has_chat=False),
}
"""LongBench's data sets, with its metrics and its answers' lengths."""


@dataclass(frozen=True)
class Published:
    """What the benchmark's own files say, of the data sets that they name."""

    templates: dict[str, Template]
    lengths: dict[str, int]


def load(
    path: Path, *, count: int | None = None, seed: int = 0, limits: Limits = DEFAULT_LIMITS
) -> list[Example]:
    """Read LongBench files; see `Load`."""
    near: dict[Path, Published] = {}

    def open_file(file: Path, problems: Problems) -> Build:
        if file.parent not in near:
            near[file.parent] = read_published(file.parent, problems)
        published = near[file.parent]
        return partial(build_example, file=file, published=published, limits=limits)

    return load_examples(path, open_file, name="longbench", count=count, seed=seed, limits=limits)


def build_example(
    record: Record, example_id: str, *, file: Path, published: Published, limits: Limits
) -> Example:
    """The example of one line."""
    if "choice_A" in record.fields:
        record.wrong.append(
            "this is LongBench v2, a benchmark of multiple choice in another format, which is"
            " not read here"
        )
        return Example(example_id, "longbench", "", "", (), "f1", 0)
    name = record.text("dataset", optional=True) or file.stem
    base = name.removesuffix("_e")
    is_e = name != base or file.stem.endswith("_e")
    task = f"longbench/{base}_e" if is_e else f"longbench/{base}"
    references = record.texts("answers")
    classes = record.texts("all_classes", optional=True)
    dataset = DATASETS.get(base) or _unknown(bool(classes), record.fields.get("language"))
    if dataset.scorer == "classification" and not classes:
        record.wrong.append("`all_classes` is missing, which this data set is scored by")
    fields: dict[str, Any] = {
        **record.fields,
        "context": record.text("context"),
        "input": record.text("input", may_be_empty=True),
    }
    template = published.templates.get(base)
    tags = _tags_of(record, dataset, is_e)
    tags["template"] = PROMPTS if template else "generic"
    template = template or GENERIC[dataset.template]
    missing = sorted(template.fields - fields.keys())
    if missing:
        record.wrong.append(f"`{missing[0]}` is missing, which {PROMPTS} asks for")
        return Example(example_id, task, "", "", references, dataset.scorer, 0)
    context, question = template.fill(fields)
    return Example(
        example_id=example_id,
        task=task,
        context=context,
        question=question,
        references=references,
        scorer=dataset.scorer,
        max_tokens=limits.answer(published.lengths.get(base, dataset.max_tokens)),
        # LongBench ends samsum's answers at a line break, after one token at least.
        stop=("\n",) if base == "samsum" else (),
        choices=classes,
        tags=tags,
    )


def _tags_of(record: Record, dataset: Dataset, is_e: bool) -> Tags:
    """What reports group by; of LongBench-E, the interval of lengths that it reports too."""
    tags = record.tags(words="length", language="language", id="_id")
    if not dataset.has_chat:
        tags["chat"] = "no"
    words = tags.get("words")
    if is_e and isinstance(words, int | float):
        tags["interval"] = "0-4k" if words < 4000 else "4-8k" if words < 8000 else "8k+"
    return tags


def _unknown(has_classes: bool, language: Any) -> Dataset:
    if has_classes:
        return Dataset("classification", 64, "examples")
    if language == "zh":
        return Dataset("f1_zh", 64, "question_zh")
    return Dataset("f1", 64)


def read_published(folder: Path, problems: Problems) -> Published:
    """The benchmark's own prompts and lengths, where they lie near the data."""
    places = (folder, folder / "config", folder.resolve().parent / "config")
    templates: dict[str, Template] = {}
    lengths: dict[str, int] = {}
    for file in (place / name for place in places for name in (PROMPTS, LENGTHS)):
        is_prompts = file.name == PROMPTS
        if (templates if is_prompts else lengths) or not file.is_file():
            continue
        for dataset, value in _read_object(file, problems).items():
            if is_prompts and isinstance(value, str):
                try:
                    templates[dataset] = Template.parse(value)
                except ValueError as error:
                    problems.add(file, f"the prompt of {dataset} cannot be used: {error}")
            elif not is_prompts and type(value) is int and value > 0:
                lengths[dataset] = value
            else:
                wanted = "a text" if is_prompts else "a number of tokens above 0"
                problems.add(file, f"{dataset} is {kind(value)}, where {wanted} belongs")
    return Published(templates, lengths)


def _read_object(file: Path, problems: Problems) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        problems.add(file, f"it cannot be read as JSON: {error}")
        return {}
    if not isinstance(value, dict):
        problems.add(file, f"it holds {kind(value)}, where one JSON object belongs")
        return {}
    return value


LONGBENCH = Format(
    "longbench", "LongBench: questions, summaries, few-shot and code on real documents", load
)
