"""Tasks whose examples are made offline, from a seed.

RULER's synthetic kinds by their definitions (Hsieh et al. 2024, arXiv:2404.06654) in wording of
our own, so scores are not comparable with published ones; and kinds that ask what an eviction may
cost: lookup among equals, many examples, later questions, the system message.
"""

from kvsieve.evals.tasks.common_words import COMMON_WORDS
from kvsieve.evals.tasks.few_shot import FEW_SHOT
from kvsieve.evals.tasks.frequent_words import FREQUENT_WORDS
from kvsieve.evals.tasks.instruction import INSTRUCTION
from kvsieve.evals.tasks.kv_retrieval import KV_RETRIEVAL
from kvsieve.evals.tasks.multi_turn import MULTI_TURN
from kvsieve.evals.tasks.niah import NIAH_TASKS
from kvsieve.evals.tasks.second_question import SECOND_QUESTION
from kvsieve.evals.tasks.task import CountTokens, Generate, Task
from kvsieve.evals.tasks.variable_tracking import VARIABLE_TRACKING

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        *NIAH_TASKS,
        VARIABLE_TRACKING,
        COMMON_WORDS,
        FREQUENT_WORDS,
        KV_RETRIEVAL,
        FEW_SHOT,
        MULTI_TURN,
        SECOND_QUESTION,
        INSTRUCTION,
    )
}
"""Every task by its name."""

__all__ = ["TASKS", "CountTokens", "Generate", "Task"]
