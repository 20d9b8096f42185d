"""The one exception for mistakes that are the user's to mend."""


class InputError(ValueError):
    """Bad input, told in one sentence: what is wrong, where (file, line, setting), and the way out.

    The command line prints it without a traceback and exits with status 2.
    """
