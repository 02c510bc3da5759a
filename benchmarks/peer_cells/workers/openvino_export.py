"""Converts a checkpoint for OpenVINO: ``python openvino_export.py CHECKPOINT FOLDER``."""

import sys

from optimum.intel import OVModelForCausalLM


def main(checkpoint: str, folder: str) -> None:
    # By default, weights of more than a billion parameters are converted to int8.
    model = OVModelForCausalLM.from_pretrained(
        checkpoint, export=True, compile=False, load_in_8bit=False
    )
    model.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
