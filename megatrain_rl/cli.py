"""The command `megatrain-rl`."""

import argparse
import sys


def main() -> None:
    parser = argparse.ArgumentParser(prog="megatrain-rl", description="Tools of the layer-streaming trainer.")
    commands = parser.add_subparsers(dest="command", required=True)
    bench = commands.add_parser("bench", help="measure on this machine").add_subparsers(dest="bench", required=True)
    step_parser = bench.add_parser("step", help="whole training steps of a real shape with random weights")
    from megatrain_rl.bench import step

    step.add_arguments(step_parser)
    arguments = parser.parse_args()
    try:
        step.run(arguments)
    except ValueError as error:
        sys.exit(f"megatrain-rl: {error}")


if __name__ == "__main__":
    main()
