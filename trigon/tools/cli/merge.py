"""`trigon merge --local_dir .../actor`: `trigon export` by the name of EasyR1's script.

The script's option to upload the model is answered with the command that does it.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from trigon.tools.cli.export import export, make_parser


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit status. Raises TrigonError."""
    parser = make_parser("trigon merge")
    parser.add_argument("--hf_upload_path", metavar="REPOSITORY", help="not supported: names the command that uploads")
    options = parser.parse_args(arguments)
    if options.hf_upload_path:
        default = options.local_dir / "huggingface" if options.local_dir else options.checkpoint / "huggingface_model"
        folder = options.output or default
        parser.error(
            "--hf_upload_path is not supported, as this command uploads nothing. Leave it out, and then run: "
            f"hf upload {shlex.quote(options.hf_upload_path)} {shlex.quote(str(folder))}"
        )
    return export(options)
