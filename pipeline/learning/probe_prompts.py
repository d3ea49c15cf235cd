"""The probe's prompts: fixed texts, so that versions of any run, machine and Python compare.

They come from modules of the Python standard library (3.11, PSF licence) that are held out of the built-in models'
training. Docs are the first words of paragraphs in the midst of a docstring, code the first lines of functions without
one: no built-in stream yields either.
"""

import hashlib

DOCS = (
    "In this policy, each thread has its own event loop.  However, we",
    "Note when comparing these calendars to the ones printed by cal(1): By",
    ("This class deals with parsing and interpreter state (the user's\nnamespace); it"),
    "Classes can use the same interfaces to control copying that they use",
    "Returns a list of (string, charset) pairs containing each of the decoded",
    ("In the two-argument form of the constructor, Fraction(8, 6) will\nproduce a"),
    ("The pattern may contain simple shell-style wildcards a la\nfnmatch. Unlike fnmatch,"),
    ("The 'package' argument is required when performing a relative import. It\nspecifies"),
    ("If ``strict`` is false (true is the default), then control\ncharacters will"),
    ("The optional *protocol* argument tells the pickler to use the\ngiven protocol;"),
    "This should be interpreted in this way: you have two data points",
    "If the fixture may be used for many test cases, create as",
)

CODE = (
    (
        "def _repr_info(self):\n"
        "    info = [self.__class__.__name__]\n"
        "    if self._cancelled:\n"
        "        info.append('cancelled')\n"
        "    if self._callback is not None:\n"
    ),
    (
        "def _deepcopy_tuple(x, memo, deepcopy=deepcopy):\n"
        "    y = [deepcopy(a, memo) for a in x]\n"
        "    # We're not going to put the tuple in the memo, but it's still important we\n"
        "    # check for it, in case the tuple contains recursive mutable structures.\n"
        "    try:\n"
    ),
    (
        "def _format_time(hh, mm, ss, us, timespec='auto'):\n"
        "    specs = {\n"
        "        'hours': '{:02d}',\n"
        "        'minutes': '{:02d}:{:02d}',\n"
        "        'seconds': '{:02d}:{:02d}:{:02d}',\n"
    ),
    (
        "def _format_code_info(co):\n"
        "    lines = []\n"
        '    lines.append("Name:              %s" % co.co_name)\n'
        '    lines.append("Filename:          %s" % co.co_filename)\n'
        '    lines.append("Argument count:    %s" % co.co_argcount)\n'
    ),
    (
        "def _normalize(self):\n"
        "    # Step 1: Normalize the chunks so that all runs of identical charsets\n"
        "    # get collapsed into a single unicode string.\n"
        "    chunks = []\n"
        "    last_charset = None\n"
    ),
    (
        "def _iglob(pathname, root_dir, dir_fd, recursive, dironly,\n"
        "           include_hidden=False):\n"
        "    dirname, basename = os.path.split(pathname)\n"
        "    if not has_magic(pathname):\n"
        "        assert not dironly\n"
    ),
    (
        "def read(self, size):\n"
        "    if self._read is None:\n"
        "        return self.file.read(size)\n"
        "    if self._read + size <= self._length:\n"
        "        read = self._read\n"
    ),
    (
        "def JSONArray(s_and_end, scan_once, _w=WHITESPACE.match, _ws=WHITESPACE_STR):\n"
        "    s, end = s_and_end\n"
        "    values = []\n"
        "    nextchar = s[end:end + 1]\n"
        "    if nextchar in _ws:\n"
    ),
    (
        "def get_token(self):\n"
        "    if self.pushback:\n"
        "        return self.pushback.pop(0)\n"
        '    token = ""\n'
        '    fiter = iter(self._read_char, "")\n'
    ),
    (
        "def _getattribute(obj, name):\n"
        "    for subpath in name.split('.'):\n"
        "        if subpath == '<locals>':\n"
        '            raise AttributeError("Can\'t get local attribute {!r} on {!r}"\n'
        "                                 .format(name, obj))\n"
    ),
    (
        "def _get_filter_function(self, filter):\n"
        "    if filter is None:\n"
        "        filter = self.extraction_filter\n"
        "        if filter is None:\n"
        "            return fully_trusted_filter\n"
    ),
    (
        "def getFeature(self, name):\n"
        "    if name == feature_namespaces:\n"
        "        return self._namespaces\n"
        "    elif name == feature_string_interning:\n"
        "        return self._interning is not None\n"
    ),
)

PROMPTS = (*(("docs", text) for text in DOCS), *(("code", text) for text in CODE))


def identity() -> str:
    """Return a digest of the prompts, for the names of data sets and of cached files."""
    return f"{len(PROMPTS)} prompts, {hashlib.sha256(repr(PROMPTS).encode()).hexdigest()[:12]}"
