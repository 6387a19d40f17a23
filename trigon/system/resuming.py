"""Says which command resumes a run. Every message that tells how to continue uses these words."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SameCommand:
    """The command of a run, with the option that it needs to continue from a checkpoint.

    folder: run folder. finds_last: without an option the command resumes from the last checkpoint
    there. saves_weights_only: no checkpoint of the run can be resumed.
    Each method returns a clause of "the same command", or that "with
    trainer.load_checkpoint_path=...", and what it does ("resumes after step 5"). With
    saves_weights_only it returns what can be done with weights.
    """

    folder: Path = Path()
    finds_last: bool = True
    saves_weights_only: bool = False

    def from_last(self, does: str) -> str:
        """Go on from the last checkpoint in the run folder, whichever that is."""
        return self.from_checkpoint(self.folder / "global_step_...", does)

    def from_step(self, step: int, does: str) -> str:
        """Go on after this step, of which the run folder has the last checkpoint."""
        return self.from_checkpoint(self.folder / f"global_step_{step}", does)

    def from_checkpoint(self, checkpoint: Path, does: str) -> str:
        """Go on from the last checkpoint. checkpoint: its folder, global_step_N."""
        if self.saves_weights_only:
            return WEIGHTS_ONLY
        option = "" if self.finds_last else f" with trainer.load_checkpoint_path={shlex.quote(str(checkpoint))}"
        return f"the same command{option} {does}"


WEIGHTS_ONLY = (
    "checkpoints of trainer.save_model_only=true cannot be resumed; to train on from one, export it, and start a new "
    "run with the export as worker.actor.model.model_path"
)

SAME_COMMAND = SameCommand()
"""Of a run whose command finds its last checkpoint."""
