"""Messages of protected roles, found in rendered chats without an engine."""

from __future__ import annotations

import asyncio
import copy
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsieve.core.protection import known_spans
from kvsieve.engine.frontend import protected_roles
from kvsieve.engine.frontend.marked_chat import MarkedChat, NotLocatedError
from tests.unit.chat_double import (
    CHATML,
    LATE,
    PARTS,
    TEMPLATES,
    TOKEN,
    Renderer,
    TokenizeParams,
    chat,
    rendered,
)


def found_words(template: str, messages: Any, *roles: str) -> list[str]:
    """What is protected of a chat, as texts of spans."""
    renderer = Renderer(template, {})
    before = copy.deepcopy(messages)
    spans = rendered(renderer, messages)["kvsieve_chat"].locate(roles)
    assert messages == before
    words = renderer.words(messages)
    return ["".join(words[begin:end]) for begin, end in spans]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_system_message_is_found_wherever_a_template_puts_it(name: str) -> None:
    messages = chat(("system", "Answer in French."), ("user", "What is a cache?"))

    assert found_words(TEMPLATES[name], messages, "system") == ["Answer in French."]
    assert found_words(TEMPLATES[name], messages, "user") == ["What is a cache?"]


def test_the_same_text_elsewhere_is_not_taken_for_the_message() -> None:
    rule = "Be brief"
    messages = chat(("system", rule), ("user", f"{rule} {rule}"), ("assistant", rule))

    renderer = Renderer(LATE, {})
    (span,) = rendered(renderer, messages)["kvsieve_chat"].locate(("system",))

    words = renderer.words(messages)
    assert "".join(words[span[0] : span[1]]) == rule
    assert span[1] == len(words) - 1  # before the closing quote


@pytest.mark.parametrize("name", ["chatml", "trimming", "parts"])
def test_several_messages_and_several_roles(name: str) -> None:
    messages = chat(
        ("system", "First rule."),
        ("developer", "Second rule."),
        ("user", "Hello"),
        ("system", "  Third rule.\n"),
        ("user", "Again"),
    )

    assert found_words(TEMPLATES[name], messages, "system") == ["First rule.", "Third rule."]
    assert found_words(TEMPLATES[name], messages, "system", "developer") == [
        *["First rule.", "Second rule.", "Third rule."]
    ]


def test_text_in_parts_is_found_as_one() -> None:
    parts = [{"type": "text", "text": text} for text in (" ", "One, ", "two, ", "three. ", "")]
    messages = chat(("system", parts), ("user", ["Plain", " strings"]))
    template = PARTS.replace("p.text", "(p if p is string else p.text)")

    assert found_words(template, messages, "system") == ["One, two, three."]
    assert found_words(template, messages, "user") == ["Plain strings"]


def test_what_is_nothing_is_not_missed() -> None:
    messages = chat(("system", " \n"), ("developer", None), ("tool", []), ("user", "Hi"))

    assert found_words(PARTS, messages[:1] + messages[3:], "system") == []
    assert found_words(PARTS, messages[:1] + messages[3:], "tool") == []
    assert found_words(LATE, messages[3:], "system", "user") == ["Hi"]


CONTENT = st.text(alphabet="ab \n|<>é{}%", max_size=8)


@given(
    st.lists(st.tuples(st.sampled_from(["system", "user", "tool"]), CONTENT), max_size=6),
    st.sampled_from([("system",), ("user", "system"), ("tool",)]),
)
def test_found_tokens_are_those_that_the_template_wrote(
    turns: list[tuple[str, str]], roles: tuple[str, ...]
) -> None:
    # The same template, writing in Python and taking notes.
    text, characters = "", set()
    for role, content in turns:
        text += f"<|im_start|>{role}\n"
        core = content.strip()
        if role in roles and core:
            begin = len(text) + content.index(core)
            characters |= set(range(begin, begin + len(core)))
        text += f"{content}<|im_end|>\n"
    tokens = enumerate(TOKEN.finditer(text + "<|im_start|>assistant\n"))
    expected = {index for index, token in tokens if characters & set(range(*token.span()))}

    spans = rendered(Renderer(CHATML, {}), chat(*turns))["kvsieve_chat"].locate(roles)

    # White space within a message belongs to it; glue between two messages does not.
    assert {p for begin, end in spans for p in range(begin, end)} == expected


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        ("{{ messages[1].content }}", chat(("system", "a"), ("user", "b")), "leaves out"),
        ("{{ messages[0].content[:20] }}", chat(("system", "a")), "leaves out"),
        ("{{ messages[0].content | length }} {{ messages[0].content }}", chat(("system", "a")), ""),
        ("{{ messages[0].content | upper }}", chat(("system", "abc")), "leaves out"),
        (
            "{{ 'x' if messages[0].content.startswith('a') }}{{ messages[0].content }}",
            chat(("system", "abc")),
            "writes other text",
        ),
    ],
)
def test_what_a_template_does_to_a_text_is_not_guessed(
    template: str, messages: Any, reason: str
) -> None:
    chat_of = rendered(Renderer(template, {}), messages)["kvsieve_chat"]

    for _ in range(2):
        with pytest.raises(NotLocatedError, match=reason or "other text"):
            chat_of.locate(("system",))


def test_a_text_that_is_written_twice_is_found_twice() -> None:
    template = "{{ messages[0].content }} and {{ messages[0].content }}!"

    assert found_words(template, chat(("system", "so it is")), "system") == ["so it is"] * 2


@pytest.mark.parametrize(
    ("content", "more", "reason"),
    [
        ("x", {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, "calls tools"),
        ([{"type": "image"}], {}, "something else than text"),
        ([{"type": "text", "text": "x"}, {"type": "image", "text": None}], {}, "something else"),
    ],
)
def test_what_is_no_text_is_not_located(content: Any, more: Any, reason: str) -> None:
    with pytest.raises(NotLocatedError, match=reason):
        MarkedChat([{"role": "system", "content": content, **more}], ("system",))


def test_calls_of_tools_in_other_messages_are_rendered_again_as_they_were() -> None:
    calls = [{"function": {"name": "f", "arguments": {"a": "é"}}}]
    messages = [*chat(("system", "x")), {"role": "assistant", "content": None, "tool_calls": calls}]
    before = copy.deepcopy(messages)

    marked = MarkedChat(messages, ("system",))

    assert marked.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a": "é"}'
    assert messages == before


@pytest.mark.parametrize("kind", ["multimodal", "embeds", "no offsets", "no text", "truncated"])
def test_a_prompt_that_cannot_be_looked_into_says_so(kind: str) -> None:
    renderer = Renderer("{{ messages[1].content }} {{ messages[0].content }}", {})
    messages = chat(("system", "Be brief"), ("user", "Hi"))
    tok_params = TokenizeParams(keep=1 if kind == "truncated" else None)
    engine_input = rendered(renderer, messages, tok_params)
    if kind in ("multimodal", "embeds"):
        engine_input["type"] = kind
        protected_roles._remember(renderer, (([messages]), [engine_input]), None, tok_params)
    renderer.has_offsets = kind != "no offsets"
    if kind == "no text":
        renderer.render_messages = lambda messages, params: (messages, {"prompt_token_ids": [1]})

    with pytest.raises(NotLocatedError):
        engine_input["kvsieve_chat"].locate(("system",))
    assert engine_input["kvsieve_chat"].locate(("developer",)) == ()


def test_an_engine_that_is_not_configured_remembers_nothing() -> None:
    renderer = Renderer(CHATML)

    assert "kvsieve_chat" not in rendered(renderer, chat(("system", "x")))


# What a request gets.
LONG = " ".join(f"w{index}" for index in range(200))
MESSAGES = chat(("system", "Answer in French."), ("user", LONG))


def request(
    settings: dict[str, Any], extra_args: Any, messages: Any = MESSAGES, template: str = CHATML
) -> tuple[Any, list[str]]:
    """The spans of a chat, and the words that they hold."""
    renderer = Renderer(template, settings)
    engine_input = rendered(renderer, messages)
    num_tokens = len(engine_input["prompt_token_ids"])
    spans = protected_roles.protected_spans(renderer.config, extra_args, engine_input, num_tokens)
    words = renderer.words(messages)
    return spans, ["".join(words[begin:end]) for begin, end in spans or ()]


def test_the_operators_roles_hold_where_the_client_names_nothing() -> None:
    roles = {"protect_roles": ("system",), "budget": 128}

    assert request(roles, None)[1] == ["Answer in French."]
    assert request(roles, {"kv_budget": 100})[1] == ["Answer in French."]
    assert request(roles, {"kv_protect": "0:2"})[0] == ((0, 2),)
    assert request(roles, {"kv_protect": "none"})[0] == ()
    assert request({"budget": 128}, None)[0] is None
    assert request(roles, None, chat(("user", LONG)))[0] == ()


def test_a_client_may_name_roles_and_spans_together() -> None:
    _, words = request({"budget": 128}, {"kv_protect": "system,20:22"})

    assert words[0] == "Answer in French."
    assert len(words) == 2


@pytest.mark.parametrize(
    ("wish", "refusal"),
    [
        ("sytem", "no message has the role 'sytem'; did you mean 'system'"),
        ("developer", "no message has the role developer"),
        ("developer,tool", "no message has the role developer or tool"),
        ("critic", "no message has the role 'critic'$"),
        ("0:10000", "leaves the prompt"),
        ("0-12", "neither a span nor a role"),
    ],
)
def test_a_client_is_told_what_does_not_exist(wish: str, refusal: str) -> None:
    with pytest.raises(ValueError, match=refusal):
        request({"budget": 128}, {"kv_protect": wish})


def test_one_of_several_roles_is_enough() -> None:
    assert request({"budget": 128}, {"kv_protect": "system,developer"})[1] == ["Answer in French."]


def test_a_slip_in_the_key_is_named() -> None:
    for slip in ("kv_protec", "kv-protect", "KV_PROTECT", "kvprotect", "kv_protects"):
        with pytest.raises(ValueError, match="did you mean 'kv_protect'"):
            request({}, {slip: "system"})


def test_what_cannot_be_found_is_refused_for_clients_and_logged_once_for_operators(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    protected_roles._warn_once.cache_clear()
    template = "{{ messages[1].content }}"

    with pytest.raises(ValueError, match="cannot be found in the prompt: the chat template leaves"):
        request({"budget": 128}, {"kv_protect": "system"}, template=template)
    for _ in range(3):
        spans, _ = request({"budget": 128, "protect_roles": ("system",)}, None, template=template)
        assert spans == ()
    assert ["not protected" in record.message for record in caplog.records] == [True]


def test_an_error_of_ours_is_a_refusal_for_clients_and_nothing_for_others(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planted(*args: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(Renderer, "render_messages", planted)

    with pytest.raises(ValueError, match="could not be rendered with marks"):
        request({"budget": 128}, {"kv_protect": "system"})
    assert request({"budget": 128, "protect_roles": ("system",)}, None)[0] == ()
    assert "planted" in caplog.text


def test_a_prompt_without_messages_has_spans_but_no_roles() -> None:
    config = Renderer(CHATML, {"budget": 128, "protect_roles": ("system",)}).config

    def spans(extra_args: Any, engine_input: Any = None) -> Any:
        return protected_roles.protected_spans(config, extra_args, engine_input, 600)

    for engine_input in (None, "text", [1, 2], {"type": "token", "prompt_token_ids": [1]}):
        assert spans(None, engine_input) is None
        assert spans({"kv_protect": "3:9"}, engine_input) == ((3, 9),)
        with pytest.raises(ValueError, match="only a chat"):
            spans({"kv_protect": "system"}, engine_input)


def test_more_than_the_budget_is_refused_unless_everything_is_kept() -> None:
    settings = {"budget": 128, "num_sink_tokens": 4, "num_recent_tokens": 32}
    config = Renderer(CHATML, settings).config

    def spans(wish: str, budget: Any = None, num_tokens: int = 600) -> Any:
        extra_args = {"kv_protect": wish} | ({} if budget is None else {"kv_budget": budget})
        return protected_roles.protected_spans(config, extra_args, None, num_tokens)

    # 600 tokens under a budget of 128 store 600 - 448 = 152; 4 sinks and 32 recent are kept.
    assert spans("4:120") == ((4, 120),)
    with pytest.raises(ValueError, match=r"^153 of the prompt's 600 .* stores 152 at this budget"):
        spans("4:121")
    with pytest.raises(ValueError, match=r"raise kv_budget to at least 153,"):
        spans("4:121")
    assert spans("4:121", budget=153) == ((4, 121),)
    assert spans("0:600", budget="full") == ((0, 600),)
    assert spans("0:100", num_tokens=100) == ((0, 100),)


def test_the_mode_of_the_server_does_not_decide_what_is_valid() -> None:
    for mode in ("sieve", "shadow", "full"):
        config = Renderer(CHATML, {"budget": 128, "mode": mode}).config
        with pytest.raises(ValueError, match="stores 152"):
            protected_roles.protected_spans(config, {"kv_protect": "0:500"}, None, 600)


def test_spans_are_carried_in_a_copy() -> None:
    params = SimpleNamespace(extra_args={"kv_protect": "system", "other": 1})
    core_request = SimpleNamespace(sampling_params=params)

    protected_roles.carry_spans(core_request, ((0, 3), (5, 9)))

    carried = core_request.sampling_params.extra_args
    assert carried == {"kv_protect": [[0, 3], [5, 9]], "other": 1}
    assert known_spans(carried["kv_protect"], 9) == ((0, 3), (5, 9))
    assert params.extra_args == {"kv_protect": "system", "other": 1}
    protected_roles.carry_spans(core_request, ())
    assert known_spans(core_request.sampling_params.extra_args["kv_protect"], 9) == ()


# The early check, before a response begins.
def early(settings: Any, wish: Any) -> Any:
    renderer = Renderer(CHATML, settings)

    async def stock(online: Any, request: Any) -> Any:
        async def stock_async(*args: Any) -> Any:
            return Renderer.stock_render_chat(*args)

        (conversation,), inputs = await protected_roles._render_chat_async(
            stock_async, renderer, [MESSAGES], None, TokenizeParams()
        )
        return conversation, inputs

    request = SimpleNamespace() if wish == "tokenize" else SimpleNamespace(vllm_xargs=wish)
    online = SimpleNamespace(renderer=renderer)
    _, (engine_input,) = asyncio.run(protected_roles._preprocess_chat(stock, online, request))
    return renderer, engine_input


def test_messages_are_located_once_and_before_the_engine_is_asked() -> None:
    renderer, engine_input = early({"budget": 128}, {"kv_protect": "system"})

    assert renderer.num_renderings == 1
    (span,) = engine_input["kvsieve_chat"].locate(("system",))
    assert renderer.num_renderings == 1
    assert "".join(renderer.words(MESSAGES)[span[0] : span[1]]) == "Answer in French."


@pytest.mark.parametrize("wish", [None, {}, {"kv_budget": 100}, {"kv_protect": "0:4"}, "tokenize"])
def test_a_chat_that_protects_no_role_is_rendered_once(wish: Any) -> None:
    assert early({"budget": 128}, wish)[0].num_renderings == 0
    assert early(None, wish)[0].num_renderings == 0


def test_who_only_tokenizes_is_refused_nothing() -> None:
    settings = {"budget": 128, "protect_roles": ("user",)}

    assert early(settings, "tokenize")[1]["prompt_token_ids"]
