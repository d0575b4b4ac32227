#!/bin/sh
# doc.sh DOXYGEN SRCDIR VERSION : the API reference, from the public headers, into doc/html.
test -n "$1" || { echo 'make doc needs Doxygen (Debian, Ubuntu: doxygen)' >&2; exit 1; }
mkdir -p doc && "$1" - <<END
PROJECT_NAME = libmoe
PROJECT_NUMBER = $3
PROJECT_BRIEF = "Trainable Mixture-of-Experts for C"
INPUT = $2/include/moe $2/README.md
USE_MDFILE_AS_MAINPAGE = $2/README.md
STRIP_FROM_PATH = $2
STRIP_FROM_INC_PATH = $2/include
OUTPUT_DIRECTORY = doc
GENERATE_LATEX = NO
OPTIMIZE_OUTPUT_FOR_C = YES
EXTRACT_ALL = YES
JAVADOC_AUTOBRIEF = YES
HAVE_DOT = NO
QUIET = YES
WARN_IF_UNDOCUMENTED = NO
MACRO_EXPANSION = YES
EXPAND_ONLY_PREDEF = YES
PREDEFINED = MOE_API= MOE_CHECKED= "MOE_INIT(x)="
END
echo 'doc/html/index.html'
