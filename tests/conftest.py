"""Its being here puts tests/ on the import path, so that tests share helper modules."""

import signal

# A shell that starts a job in the background ignores SIGINT for it and all its children, so that
# no test of Ctrl-C could end there.
signal.signal(signal.SIGINT, signal.default_int_handler)
