"""What is sent to the server for one example, in tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property

from kvsieve.evals.example import Example


@dataclass(frozen=True)
class Item:
    """One prompt, ready to be sent under every setting.

    Attributes:
        item_id: Unique in a run, and the same in a run that goes on with it.
        task: Name of the task.
        prompt_ids: The prompt.
        forced_ids: What the model is made to say once the prompt is sieved.
        max_tokens: Most tokens that it says freely after that.
        example: What the free part is judged by; None where the distribution over the
            forced part is judged instead.
        tags: What groups are made by, such as depth and length.
    """

    item_id: str
    task: str
    prompt_ids: tuple[int, ...]
    forced_ids: tuple[int, ...] = ()
    max_tokens: int = 0
    example: Example | None = None
    tags: Mapping[str, int | float | str] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Positions that the request needs at most."""
        return len(self.prompt_ids) + len(self.forced_ids) + self.max_tokens

    @cached_property
    def sha256(self) -> str:
        """What is asked and how it is judged, as a hash: the id alone does not say.

        Another seed or another file may give a different question the same id. Of an example
        the text counts and not its tokens, so that two tokenizers can be compared on it.
        """
        content = asdict(self.example) if self.example else (self.prompt_ids, self.forced_ids)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
