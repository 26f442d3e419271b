"""Leaves out checks of the whole repository where plugins/ is removed."""

import importlib.util

OF_EVERYTHING = [
    *("test_architecture.py", "test_changed.py", "test_coupling.py", "test_wheel.py"),
    # The pages also describe the commands of plugins.
    *("test_docs.py", "test_guides.py", "test_json_output.py", "test_readme.py"),
]
collect_ignore = [] if importlib.util.find_spec("vitals_plugins") else OF_EVERYTHING
