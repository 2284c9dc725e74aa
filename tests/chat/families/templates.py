# ruff: noqa: RUF001  DeepSeek's special tokens are written with a fullwidth bar
"""Chat templates for families whose own are in no installed package: their marks, in our words.

`tests/chat/families/readers.py` holds what published readers write for the same messages.
"""

KIMI_K2 = """
{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_system|>{{ m.name }}<|im_middle|>## Return of {{ m.tool_call_id }}
{{ m.content }}<|im_end|>
{%- else %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}
{%- if m.tool_calls %}<|tool_calls_section_begin|>
{%- for c in m.tool_calls -%}
<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>
{%- endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""

KIMI_K2_5 = """
{%- set ns = namespace(said=-1) %}
{%- for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}{% set ns.said = loop.index0 %}{% endif %}
{%- endfor %}""" + KIMI_K2.replace(
    "{{ m.content }}\n{%- if m.tool_calls",
    "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content if loop.index0 > ns.said else '' }}</think>{% endif %}"
    "{{ m.content }}\n{%- if m.tool_calls",
).replace("assistant<|im_middle|>{% endif %}", "assistant<|im_middle|><think>{% endif %}")

_LAST_QUESTION = """
{%- set ns = namespace(first=-1, asked=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}
{%- if ns.first < 0 %}{% set ns.first = loop.index0 %}{% endif %}{% endif %}{% endfor %}"""
"""Finds the first question, and the last, up to which many templates drop thoughts."""

MINIMAX_M2 = (
    _LAST_QUESTION
    + """
{%- if tools %}]~!b[]~b]system
<tools>{{ tools | tojson }}</tools>
<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke></minimax:tool_call>[e~[
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}]~b]tool{% endif -%}
{{ '\n' }}<response>{{ m.content }}</response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}[e~[
{% endif %}
{%- else %}]~b]{{ 'ai' if m.role == 'assistant' else m.role }}
{% if m.reasoning_content and loop.index0 > ns.asked %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{%- if m.tool_calls %}{{ '\n' }}<minimax:tool_call>
{% for c in m.tool_calls %}<invoke name="{{ c.function.name }}">
{% for key, value in c.function.arguments.items() -%}
<parameter name="{{ key }}">{{ value if value is string else value | tojson }}</parameter>
{% endfor %}</invoke>
{% endfor %}</minimax:tool_call>{% endif %}[e~[
{% endif %}{% endfor %}
{%- if add_generation_prompt %}]~b]ai
<think>
{% endif %}"""
)

MINIMAX_M3 = (
    _LAST_QUESTION
    + """
{%- macro element(name, value) -%}]<]minimax[>[<{{ name }}>
{%- if value is mapping %}{% for k, v in value.items() %}{{ element(k, v) }}{% endfor %}
{%- elif value is string %}{{ value }}
{%- elif value is iterable %}{% for v in value %}{{ element('item', v) }}{% endfor %}
{%- else %}{{ value | tojson }}{% endif %}]<]minimax[>[</{{ name }}>
{%- endmacro %}
{%- if tools %}]~!b[]~b]system
<tools>{{ tools | tojson }}</tools>[e~[
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}]~b]tool{% endif -%}
{{ '\n' }}<response>{{ m.content }}</response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}[e~[
{% endif %}
{%- else %}]~b]{{ 'ai' if m.role == 'assistant' else m.role }}
{% if m.reasoning_content and loop.index0 > ns.asked %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{%- if m.tool_calls %}{{ '\n' }}]<]minimax[>[<tool_call>
{% for c in m.tool_calls %}]<]minimax[>[<invoke name="{{ c.function.name }}">
{%- for key, value in c.function.arguments.items() %}{{ element(key, value) }}{% endfor -%}
]<]minimax[>[</invoke>
{% endfor %}]<]minimax[>[</tool_call>{% endif %}[e~[
{% endif %}{% endfor %}
{%- if add_generation_prompt %}]~b]ai
{% endif %}"""
)

GLM_5 = (
    _LAST_QUESTION
    + """[gMASK]<sop>
{%- if tools %}<|system|>{{ tools | tojson }}
<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif -%}
<tool_response>{{ m.content }}</tool_response>
{%- else %}<|{{ m.role }}|>
{%- if m.role == 'assistant' %}
{%- if m.reasoning_content and loop.index0 > ns.asked %}<think>{{ m.reasoning_content }}{% endif %}</think>{% endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}
{%- for key, value in c.function.arguments.items() -%}
<arg_key>{{ key }}</arg_key><arg_value>{{ value if value is string else value | tojson }}</arg_value>
{%- endfor %}</tool_call>{% endfor %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|><think>{% endif %}"""
)

DEEPSEEK_V3_1 = """<｜begin▁of▁sentence｜>
{%- for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}
{%- if tools %}
{% for t in tools %}### {{ t.function.name }}
{{ t.function.parameters | tojson }}
{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}<｜User｜>{{ m.content }}
{%- elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>
{%- elif m.role == 'assistant' %}
{%- if messages[loop.index0 - 1].role == 'user' %}<｜Assistant｜></think>{% endif %}{{ m.content }}
{%- if m.tool_calls %}<｜tool▁calls▁begin｜>
{%- for c in m.tool_calls -%}
<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>
{%- endfor %}<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>
{%- endif %}{% endfor %}
{%- if add_generation_prompt and messages[-1].role == 'user' %}<｜Assistant｜></think>{% endif %}"""

_DSML = """<｜begin▁of▁sentence｜>
{%- for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}
{%- if tools %}

{{ tools | tojson }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}<｜User｜>{{ m.content }}<｜Assistant｜></think>
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}[[BEFORE]]{% endif %}[[ANSWER]]
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}[[AFTER]]</think>{% endif %}
{%- elif m.role == 'assistant' %}{{ m.content }}
{%- if m.tool_calls %}{{ '\n\n' }}<｜DSML｜[[BLOCK]]>
{% for c in m.tool_calls %}<｜DSML｜invoke name="{{ c.function.name }}">
{% for key, value in c.function.arguments.items() -%}
<｜DSML｜parameter name="{{ key }}" string="{{ 'true' if value is string else 'false' }}">
{{- value if value is string else value | tojson }}</｜DSML｜parameter>
{% endfor %}</｜DSML｜invoke>
{% endfor %}</｜DSML｜[[BLOCK]]>{% endif %}<｜end▁of▁sentence｜>
{%- endif %}{% endfor %}"""


def _dsml(block: str, before: str, answer: str, after: str) -> str:
    parts = {"[[BLOCK]]": block, "[[BEFORE]]": before, "[[ANSWER]]": answer, "[[AFTER]]": after}
    template = _DSML
    for name, part in parts.items():
        template = template.replace(name, part)
    return template


DEEPSEEK_V3_2 = _dsml(
    "function_calls",
    "{{ '\\n\\n<function_results>' }}",
    "{{ '\\n<result>' }}{{ m.content }}</result>",
    "{{ '\\n</function_results>\\n\\n' }}",
)
DEEPSEEK_V4 = _dsml(
    "tool_calls",
    "<｜User｜>",
    "{% if messages[loop.index0 - 1].role == 'tool' %}{{ '\\n\\n' }}{% endif %}"
    "<tool_result>{{ m.content }}</tool_result>",
    "<｜Assistant｜>",
)

LLAMA_4 = """<|begin_of_text|>
{%- for m in messages %}
{%- set role = 'ipython' if m.role == 'tool' else m.role -%}
<|header_start|>{{ role }}<|header_end|>

{% if tools and loop.first %}{{ tools | tojson }}

{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] -%}
{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}
{%- endfor %}<|eot|>
{%- endfor %}
{%- if add_generation_prompt %}<|header_start|>assistant<|header_end|>

{% endif %}"""

_MISTRAL = (
    _LAST_QUESTION
    + """<s>
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 == [[SHOWN]] %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST]{{ m.content }}[/INST]
{%- elif m.role == 'tool' %}[TOOL_RESULTS][[ID]]{{ m.content }}[/TOOL_RESULTS]
{%- elif m.role == 'assistant' %}{{ m.content }}[[CALLS]]</s>
{%- endif %}{% endfor %}"""
)
"""Up to v11, the tools are shown before the last question; since v13, before the first."""


def _mistral(shown: str, call_id: str, calls: str) -> str:
    return _MISTRAL.replace("[[SHOWN]]", shown).replace("[[ID]]", call_id).replace("[[CALLS]]", calls)


MISTRAL_V7 = _mistral(
    "ns.asked",
    "{{ m.tool_call_id }}[TOOL_CONTENT]",
    "{% if m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}",
)
MISTRAL_V11 = _mistral(
    "ns.asked",
    "{{ m.tool_call_id }}[TOOL_CONTENT]",
    "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]"
    "{{ c.function.arguments | tojson }}{% endfor %}",
)
MISTRAL_V13 = _mistral(
    "ns.first",
    "",
    "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
    "{{ c.function.arguments | tojson }}{% endfor %}",
)

PHI_4_MINI = """
{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}
{%- if m.role == 'system' and m.tools %}<|tool|>{{ m.tools }}<|/tool|>{% endif %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
"""It takes tools from a key of the system message, and not from the variable `tools`."""
PHI_4_MINI_WITH_TOOLS = """
{%- if tools %}<|system|>Write functools[{"name": "NAME", "arguments": {}}]. {{ tools | tojson }}<|end|>{% endif %}
{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}
{%- if m.tool_calls %}functools[
{%- for c in m.tool_calls -%}
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
{%- if not loop.last %}, {% endif %}{% endfor %}]{% endif %}<|end|>
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
"""Like the template that vLLM has for Phi-4-mini."""
