"""Says which command goes on with a run, for messages of its end.

Every message that tells how to go on takes its words from here.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SameCommand:
    """The command of a run, with the option that it needs to go on from a checkpoint.

    folder: of the run. finds_last: without an option the command goes on from the last checkpoint
    there. Each method returns "the same command", or that "with trainer.load_checkpoint_path=...".
    """

    folder: Path = Path()
    finds_last: bool = True

    def from_last(self) -> str:
        """Go on from the last checkpoint in the run folder, whichever that is."""
        return self.from_checkpoint(self.folder / "global_step_...")

    def from_step(self, step: int) -> str:
        """Go on after this step, of which the run folder has the last checkpoint."""
        return self.from_checkpoint(self.folder / f"global_step_{step}")

    def from_checkpoint(self, checkpoint: Path) -> str:
        """Go on from the last checkpoint. checkpoint: its folder, global_step_N."""
        if self.finds_last:
            return "the same command"
        return f"the same command with trainer.load_checkpoint_path={shlex.quote(str(checkpoint))}"


SAME_COMMAND = SameCommand()
"""Of a run whose command finds its last checkpoint."""
