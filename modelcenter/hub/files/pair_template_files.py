"""Chat templates for the query and text of a reranker, as sentence-transformers renders them (from 5.4 on): two
messages with the roles "query" and "document", optionally preceded by an instruction with the role "system".

The template belongs to the tokenizer, so every copy of a tokenizer includes it. Imports no torch.
"""

import json
import re
from pathlib import Path
from typing import Any

from modelcenter.hub.files.embedding_files import CROSS_ENCODER, SETTINGS_FILE, FindFile, stored_kind
from modelcenter.hub.files.json_files import read_json
from modelcenter.hub.files.names import TOKENIZER_CONFIG_FILE

TEMPLATE_FILE = "chat_template.jinja"
ROLES = ("query", "document")
# Sets the instruction if no message does. The variable stays set, because blocks of "if" are no scopes in Jinja.
_SET_INSTRUCTION = (
    "{%- if messages[0]['role'] != 'system' -%}"
    "{%- set messages = [{'role': 'system', 'content': INSTRUCTION}] + messages -%}"
    "{%- endif %}\n"
)
_INSTRUCTION_IS_SET = re.compile(
    re.escape(_SET_INSTRUCTION).replace("INSTRUCTION", r'"(?:[^"\\]|\\.)*"'), flags=re.DOTALL
)


def writes_pairs(template: Any) -> bool:
    """Whether a chat template is for pairs: it names both roles. (Many templates for chats accept any role.)"""
    return isinstance(template, str) and all(re.search(rf"""["']{role}["']""", template) for role in ROLES)


def with_instruction(template: str, instruction: str) -> str:
    """A template for pairs with this default instruction, which replaces an earlier one."""
    literal = json.dumps(instruction, ensure_ascii=False)
    return _SET_INSTRUCTION.replace("INSTRUCTION", literal) + _INSTRUCTION_IS_SET.sub("", template, count=1)


def template_with_prompt(find: FindFile, template: Any) -> Any:
    """A tokenizer's chat template; one for pairs includes the instruction in the files of a cross-encoder, if there is
    one. Any other template is unchanged.

    Args:
        find: name of a file -> its path, or None if it does not exist.
    """
    prompt = default_prompt(find) if writes_pairs(template) else None
    return template if prompt is None else with_instruction(template, prompt)


def default_prompt(find: FindFile) -> str | None:
    """The text that sentence-transformers puts before each query, or into a template as the instruction."""
    path = find(SETTINGS_FILE)
    if path is None or stored_kind(find) != CROSS_ENCODER:
        return None
    values = read_json(path)
    prompts, name = values.get("prompts") or {}, values.get("default_prompt_name")
    found = prompts.get(name) if isinstance(prompts, dict) and name is not None else None
    return found or None


def stored_template(find: FindFile) -> Any:
    """The chat template in the files of a tokenizer; None if there is none."""
    path = find(TEMPLATE_FILE)
    if path is not None:
        return path.read_text(encoding="utf-8")
    config = find(TOKENIZER_CONFIG_FILE)
    return None if config is None else read_json(config).get("chat_template")


def write_prompt(find: FindFile, directory: Path) -> None:
    """Write the instruction in the files of a cross-encoder into the copy of its template in a directory.

    Args:
        find: as in template_with_prompt.
    """
    stored = stored_template(find)
    if (made := template_with_prompt(find, stored)) != stored:
        (directory / TEMPLATE_FILE).write_text(made, encoding="utf-8")
