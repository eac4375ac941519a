"""Chat templates: the model's own text, its own refusals, and no way out of the sandbox."""

import pytest

from gateway.chat_template import ChatTemplate
from gateway.conversation import ChatMessage, Conversation, ToolCall
from gateway.errors import ChatTemplateError, TokenizerError
from gateway.tokenizer import Tokenizer

HELLO = (ChatMessage("user", "Hello <&> 'you'"),)


def render(source: str, messages: tuple[ChatMessage, ...] = HELLO, bytes_max: int = 1000, **texts: str) -> str:
    return ChatTemplate(source, texts).render(Conversation(tuple(messages)), bytes_max)


def test_smollm2_opens_with_its_system_prompt_and_the_assistants_turn(smollm2: Tokenizer) -> None:
    assert smollm2.chat_template is not None
    assert smollm2.chat_template.render(Conversation((ChatMessage("user", "Hi"),)), 1000) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    messages = [ChatMessage("system", "Be brief."), ChatMessage("user", "Hi"), ChatMessage("assistant", "Hello")]
    assert smollm2.chat_template.render(Conversation(tuple(messages)), 1000, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% if true %}\n  {% set x = 1 %}\n{{ x }}{% endif %}\n", "1"),
        ("{{ messages[0].content }}", "Hello <&> 'you'"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Hello <&> \'you\'"}]'),
        ("{{ {'é': 1} | tojson(indent=1) }}", '{\n "é": 1\n}'),
        ("{{ bos_token }}{{ eos_token }}|{{ pad_token }}", "<s></s>|"),
        ("{{ tools is none and documents is none }}", "True"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_templates_find_what_transformers_gives_them(source: str, text: str) -> None:
    assert render(source, bos_token="<s>", eos_token="</s>") == text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ messages.append(1) }}", "refused"),
        ("{{ messages[0].__class__.__mro__ }}", "refused"),
        ("{{ 'x' + 1 }}", "refused"),
        ("{{ 1 / 0 }}", "refused"),
        ("{{ messages[0].content.nothing.more }}", "refused"),
        ("{{ raise_exception('long ' * 1000) }}", "long"),
    ],
)
def test_a_template_that_refuses_or_fails_is_one_kind_of_error(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message) as caught:
        render(source)
    assert len(str(caught.value)) < 400


def test_a_rendered_text_has_a_bound() -> None:
    assert render("{{ 'é' * 500 }}") == "é" * 500
    with pytest.raises(ChatTemplateError, match="longer than 1000 bytes"):
        render("{{ 'é' * 501 }}")
    with pytest.raises(ChatTemplateError, match="longer than 1000 bytes"):
        render("{% for i in range(90000) %}{% for j in range(90000) %}x{% endfor %}{% endfor %}")


def test_a_template_that_does_not_compile_is_refused_when_the_model_is_loaded() -> None:
    with pytest.raises(TokenizerError, match="line 2"):
        ChatTemplate("\n{% if %}", {})


def test_tools_calls_and_further_arguments_reach_the_template() -> None:
    call = ToolCall("c1", "weather", {"city": "Oslo"})
    conversation = Conversation(
        (
            ChatMessage("user", "?"),
            ChatMessage("assistant", "", tool_calls=(call,)),
            ChatMessage("tool", "4 °C", name="weather", tool_call_id="c1"),
        ),
        tools=({"type": "function", "function": {"name": "weather"}},),
        template_args={"enable_thinking": False, "documents": ["d"]},
    )
    source = "{{ tools | tojson }}|{{ messages[1:] | tojson }}|{{ enable_thinking }}|{{ documents[0] }}|{{ bos_token }}"
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(conversation, 1000) == (
        '[{"type": "function", "function": {"name": "weather"}}]'
        '|[{"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", '
        '"function": {"name": "weather", "arguments": {"city": "Oslo"}}}]}, '
        '{"role": "tool", "content": "4 °C", "name": "weather", "tool_call_id": "c1"}]|False|d|<s>'
    )


def test_an_answer_that_was_begun_goes_on_where_it_stood(smollm2: Tokenizer) -> None:
    template = smollm2.chat_template
    assert template is not None
    begun = Conversation((ChatMessage("user", "Hi"), ChatMessage("assistant", "Hello, \n")), continue_final_message=True)
    assert template.render(begun, 1000).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello, \n")
    with pytest.raises(ChatTemplateError, match="leaves the last message out"):
        ChatTemplate("{{ messages[0].content }}", {}).render(begun, 1000)


def test_what_is_not_allowed_to_be_changed_is_not() -> None:
    with pytest.raises(ChatTemplateError, match="refused"):
        args = {"list": []}
        ChatTemplate("{{ list.append(1) }}", {}).render(Conversation(HELLO, template_args=args), 1000)
