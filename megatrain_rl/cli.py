"""The command `megatrain-rl`: benchmarks of this machine. It makes their record and puts it in its place."""

import argparse
import signal
import sys
from collections.abc import Sequence

from megatrain_rl.bench import adam, head, link, logprob, shared_prompts, step
from megatrain_rl.bench.peers import run as peers
from megatrain_rl.bench.record import Record, check_append, check_writable

_BENCHES = {
    "link": (link, "host to device, device to host, both, and beside the host optimizer"),
    "adam": (adam, "the host AdamW against memory bandwidth, torch and DeepSpeed"),
    "head": (head, "the output-matrix phase against its matrix products"),
    "step": (step, "whole training steps of a real shape with random weights"),
    "logprob": (logprob, "forward only"),
    "shared-prompts": (shared_prompts, "an update on several answers to each prompt, prompts computed once and not"),
    "peers": (peers, "the same step by DeepSpeed ZeRO-3, FSDP2 and the reference schedule"),
}


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="megatrain-rl", description="Tools of the layer-streaming trainer.")
    commands = parser.add_subparsers(dest="command", required=True)
    bench = commands.add_parser("bench", help="measure on this machine").add_subparsers(dest="bench", required=True)
    for name, (module, description) in _BENCHES.items():
        module.add_arguments(bench.add_parser(name, help=description, description=description, allow_abbrev=False))
    arguments = parser.parse_args(argv)
    record = Record(argv)
    # a time limit outside, say: what was started here ends too, and what is known is written
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        check_writable(arguments.json, "--json")
        check_append(arguments.json, arguments.append)
        if arguments.json:
            record.keep_in(arguments.json, append=arguments.append)
        _BENCHES[arguments.bench][0].run(arguments, record)
        record.finish()
    except ValueError as error:
        sys.exit(f"megatrain-rl: {error}")
    finally:
        signal.signal(signal.SIGTERM, before)
        record.write()  # of a run that failed or was ended: beside the record, with the lines that say why


if __name__ == "__main__":
    main()
