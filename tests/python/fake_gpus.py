"""A machine with two GPUs, for tests of bench/scaling: `mok info`, `bench` and `run`.

They answer at once and note their arguments in MOK_FAKE_LOG. H picks what goes wrong: 192 hangs
at EP 1, 320 has no memory and other bits at EP 2.
"""

import itertools
import json
import os
import sys
import time


def main():
    command, *arguments = sys.argv[1:]
    with open(os.environ["MOK_FAKE_LOG"], "a") as log:
        log.write(" ".join(sys.argv[1:-1]) + "\n")
    option = dict(itertools.pairwise(arguments))
    hidden, ep = int(option.get("--hidden", 0)), int(option.get("--ep", 1))
    answer = {}
    if command == "info":
        gpu = {"name": "Fake", "why_not": ""}
        answer = {"version": "0", "cpu": {"name": "-"}, "cuda": {"why_not": "", "gpus": [gpu, gpu]}}
    elif command == "run":
        answer = {"digest": {"y": f"{hidden}", "d_x": f"{2 if hidden == 320 and ep == 2 else 1}"}}
    elif hidden == 192 and ep == 1:
        time.sleep(60)
    elif hidden == 320 and ep == 2:
        answer = {"results": [{"error": "out_of_memory: weights"}]}
    else:
        ms = 1.5 if option.get("--gpus") == "1" else 1.0
        answer = {"results": [{"time_ms": {"forward": ms, "backward": 3 * ms}}]}
    print(json.dumps(answer))
    if "error" in str(answer):
        print("mok: 1 of the lines could not be measured", file=sys.stderr)
        sys.exit(3)


if __name__ == "__main__":
    main()
