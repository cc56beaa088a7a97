from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from jinja2.sandbox import SandboxedEnvironment

from edgespec.orchestrator.sandbox import MAX_STEPS, Sandbox
from edgespec.orchestrator.template import MAX_TEMPLATE_CHARS, ChatTemplate, Message, TemplateError

USER: list[Message] = [{"role": "user", "content": "Hi"}]
GROW = "{% set ns = namespace(x='xy') %}{% for i in range(100) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x }}"

HOSTILE_WORK = {
    "huge range": "{% for i in range(10**9) %}{% endfor %}",
    "nested loops": "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
    "nested loops over text": "{% set t = 'x' * 1000 %}" + "{% for i in t %}" * 8 + "{% endfor %}" * 8,
    "loops that skip every turn": "{% for i in range(100000) if false %}{% endfor %}" * 500,
    "recursive loop": "{% for a in 'ab' recursive %}{{ loop('ab') }}{% endfor %}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macro tree": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "repeat": "{{ 'x' * 10**9 }}",
    "repeat a list": "{{ [1] * 10**9 }}",
    "double by +": GROW.replace("STEP", "ns.x + ns.x"),
    "double by ~": GROW.replace("STEP", "ns.x ~ ns.x"),
    "double by list": GROW.replace("STEP", "[ns.x, ns.x]"),
    "double by tuple": GROW.replace("STEP", "(ns.x, ns.x)"),
    "double by dict": GROW.replace("STEP", "{'a': ns.x, 'b': ns.x}"),
    "double by replace": GROW.replace("STEP", "ns.x|replace('x', 'xx')"),
    "double by replace method": GROW.replace("STEP", "ns.x.replace('x', 'xx')"),
    "double by join": GROW.replace("STEP", "[ns.x, ns.x]|join"),
    "double by block": GROW.replace("{% set ns.x = STEP %}", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    "square": GROW.replace("'xy'", "3").replace("STEP", "ns.x * ns.x"),
    "power tower": "{{ 9**9**9**9 }}",
    "padding filter": "{{ 'x'|center(10**9) }}",
    "padding method": "{{ 'x'.ljust(10**9) }}",
    "format": "{{ '{:>999999999}'.format(1) }}",
    "format by %": "{{ '%999999999d' % 1 }}",
    "format filter": "{{ '%999999999d'|format(1) }}",
    "join many": "{{ range(100000)|map('string')|join('x' * 100000) }}",
    "literal text in a captured loop": "{% set x %}{% for i in range(100000) %}" + "y" * 1000 + "{% endfor %}{% endset %}",
    "text in a loop": "{% for i in range(100000) %}" + "y" * 1000 + "{% endfor %}",
    "a namespace of doubles": GROW.replace("STEP", "[ns.x, ns.x]").replace("{{ ns.x }}", "{{ ns }}"),
    "lorem ipsum": "{{ lipsum(n=100000) }}",
    "long template": "x" * (MAX_TEMPLATE_CHARS + 1),
}
HOSTILE_REACH = [
    "{{ lipsum.__globals__['os'].popen('touch TOUCH') }}",
    "{{ cycler.__init__.__globals__.os.popen('touch TOUCH').read() }}",
    "{{ joiner.__init__.__globals__.os.popen('touch TOUCH').read() }}",
    "{{ namespace.__init__.__globals__['os'].popen('touch TOUCH') }}",
    "{{ raise_exception.__globals__['__builtins__'].open('TOUCH', 'w') }}",
    "{{ strftime_now.__globals__['__builtins__']['open']('TOUCH', 'w') }}",
    "{{ self._TemplateReference__context.environment }}{{ self.__init__.__globals__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''|attr('__class__') }}",
    "{{ (messages|map(attribute='__class__')|list)[0].__mro__ }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{% set f = messages.append %}{{ f(1) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.popen('touch TOUCH') }}",
]


@pytest.mark.parametrize("source", HOSTILE_WORK.values(), ids=HOSTILE_WORK)
def test_a_template_that_does_too_much_ends_in_one_line(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(source).render(USER)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB on Linux, bytes on macOS
    assert "\n" not in str(caught.value)
    assert grown < 300_000 * (1024 if sys.platform == "darwin" else 1)


def test_every_turn_call_and_literal_is_counted() -> None:
    sandbox = Sandbox()
    template = sandbox.compiled("{% for i in range(1000) %}{% for j in range(10) %}{% endfor %}{% endfor %}")
    sandbox.start(messages=0, input_chars=0)
    template.render()
    assert MAX_STEPS - sandbox.steps_left >= 10_000


@pytest.mark.parametrize("source", HOSTILE_REACH)
def test_esb_34_a_template_never_leaves_its_sandbox(source: str, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    messages: list[Message] = [{"role": "user", "content": "Hi"}]
    try:
        text = ChatTemplate(source.replace("TOUCH", str(touched))).render(messages)
    except TemplateError as error:
        text = str(error)
    assert not touched.exists()
    assert "root:" not in text
    assert "<module" not in text
    assert messages == USER


def test_a_template_cannot_change_the_callers_messages() -> None:
    messages: list[Message] = [{"role": "user", "content": "Hi"}]
    with pytest.raises(TemplateError):
        ChatTemplate("{{ messages[0].update({'content': 'x'}) }}{{ messages.pop() }}").render(messages)
    assert messages == USER


def test_one_template_renders_again_and_again_on_a_fresh_budget() -> None:
    template = ChatTemplate("{% for i in range(20000) %}{{ i }}{% endfor %}")
    assert len({template.render(USER) for _ in range(12)}) == 1


def test_long_chats_render() -> None:
    template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if not loop.last %}|{% endif %}{% endfor %}")
    chat: list[Message] = [{"role": "user", "content": "long " * 1000}] * 1000
    assert len(template.render(chat)) == 1000 * 5006 + 999


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}\n    {%- if loop.first %}a{% endif %}\n{% endfor %}\nend\n", "aend"),
        ("{% for m in messages %}{% break %}{% endfor %}x", "x"),
        ("{{ messages|tojson }}", '[{"role": "user", "content": "Hi"}]'),
        ("{{ {'é': '<&>'}|tojson(indent=2) }}", '{\n  "é": "<&>"\n}'),
        ("{{ tools is none }}{{ documents is none }}{{ enable_thinking is defined }}", "TrueTrueFalse"),
        ("{{ bos_token + messages[0]['content'] + eos_token }}", "<s>Hi</s>"),
        ("{% if tools is defined and tools %}t{% endif %}{{ add_generation_prompt }}", "True"),
        ("{%- set ns = namespace(n=0) -%}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{% macro f(x) %}[{{ x|trim|upper }}]{% endmacro %}{{ f(' a ') }}", "[A]"),
        ("{{ ['a', 'b']|join(', ') }} {{ 'a-b'.split('-')[-1] }} {{ 'a-b'.replace('-', '+') }}", "a, b b a+b"),
        ("{{ 'a\nb'|indent(2) }}|{{ 'a\nb'|indent(2, true) }}", "a\n  b|  a\n  b"),
        ("{{ messages|map(attribute='role')|join }} {{ messages|selectattr('role', 'equalto', 'user')|list|length }}", "user 1"),
        ("{% for k, v in {'x': 1}.items() %}{{ k ~ v }}{% endfor %}{{ (1, 2)[1] }}{{ [1, 2][::-1] }}", "x12[2, 1]"),
        ("{% for m in messages %}{{ loop.index0 }}{{ loop.cycle('a', 'b') }}{{ loop.length }}{% endfor %}", "0a1"),
        ("{{ strftime_now('%Y') | length }}{{ 7 % 3 }}{{ 2 ** 3 }}{{ 2 * 3 }}", "4186"),
        ("{% call(x) f() %}{{ x }}{% endcall %}", None),
    ],
)
def test_what_chat_templates_use(source: str, expected: str | None) -> None:
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    if expected is None:
        with pytest.raises(TemplateError):
            template.render(USER)
    else:
        assert template.render(USER) == expected


@pytest.mark.parametrize("text", ["", "a", "a\n", "a\nb", "a\n\nb\n", "\n", "\n\n"])
@pytest.mark.parametrize(
    "expression",
    [
        "t|indent",
        "t|indent(2, true)",
        "t|indent('>', false, true)",
        "t|replace('a', 'xx')",
        "t|replace('', '-')",
        "[t, 1, none]|join('+')",
        "messages|join('|', attribute='role')",
        "t.replace('a', 'b', 1)",
        "'-'.join([t, 'x'])",
        "t ~ 1 ~ none",
        "[t, {'k': t}]|string",
    ],
)
def test_bounded_operations_equal_jinjas_own(expression: str, text: str) -> None:
    source = "{% set t = messages[0]['content'] %}{{ EXPRESSION }}".replace("EXPRESSION", expression)
    messages: list[Message] = [{"role": "user", "content": text}, {"role": "tool", "content": "x"}]
    assert ChatTemplate(source).render(messages) == SandboxedEnvironment().from_string(source).render(messages=messages)


REFUSES_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}"
)
DROPS_SYSTEM = "{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}] {{ m.content }}\n{% endif %}{% endfor %}"
TAKES_SYSTEM = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
CHAT: list[Message] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("source", [REFUSES_SYSTEM, DROPS_SYSTEM])
def test_esb_33_a_template_without_a_system_role_gets_it_in_the_first_user_turn(source: str) -> None:
    assert ChatTemplate(source).render(CHAT) == "[user] Be brief.\n\nHi\n"
    assert ChatTemplate(source).render(CHAT[:1]) == "[user] Be brief.\n"
    # Text that happens to occur elsewhere must not hide that the system message was dropped.
    assert ChatTemplate(source).render([{"role": "system", "content": "i"}, USER[0]]) == "[user] i\n\nHi\n"


def test_a_template_with_a_system_role_gets_it_as_it_is() -> None:
    assert ChatTemplate(TAKES_SYSTEM).render(CHAT) == "[system] Be brief.\n[user] Hi\n"


def test_esb_33_what_a_template_refuses_is_said_in_its_own_words() -> None:
    with pytest.raises(TemplateError, match=r"^Roles must alternate$"):
        ChatTemplate(REFUSES_SYSTEM).render([USER[0], USER[0]])
    with pytest.raises(TemplateError, match=r"^Roles must alternate$"):
        ChatTemplate(REFUSES_SYSTEM).render([*CHAT, USER[0]])
    assert issubclass(TemplateError, ValueError)


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ 1 / 0 }}", "{{ messages[0].nothing.at.all }}", "{{ 'a' + 1 }}", "{{ raise_exception() }}"]
)
def test_broken_templates_end_in_one_line(source: str) -> None:
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(source).render(USER)
    assert str(caught.value)
    assert "\n" not in str(caught.value)


def test_importing_the_room_loads_no_text_library() -> None:
    code = "import sys, edgespec.orchestrator.text; print([m for m in ('jinja2', 'tokenizers', 'sentencepiece') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
