"""`python -m meshwright train.py` runs a script for which `import accelerate` is meshwright's; verbs work, too."""

import os
import sys

if __name__ == "__main__":
    words = sys.argv[1:]
    is_code = bool(words) and (words[0] in ("-m", "-c") or words[0].endswith(".py"))
    if words and not is_code and not words[0].startswith("-"):
        from meshwright.config.launch.parser import VERBS

        is_code = words[0] not in VERBS
    if not is_code:
        from meshwright.commands.cli import main

        main()
    else:
        from meshwright.door import DoorError, open_door

        try:
            open_door(script=None if words[0] in ("-m", "-c") else words[0])
        except DoorError as error:
            raise SystemExit(f"meshwright: {error}") from None
        # The flags of Python stay: what is before `-m meshwright`, which may be written `-Im meshwright`.
        flags = sys.orig_argv[1 : len(sys.orig_argv) - len(words)]
        last = flags.pop()
        if not last.startswith("-"):
            last = flags.pop()
        before = last.partition("m")[0]
        flags += [before] if before != "-" else []
        os.execv(sys.executable, [sys.executable, *flags, *words])
