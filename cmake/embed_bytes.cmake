# embed_bytes: the bytes of the file FROM as the middle of a C array, written to TO.
file(READ ${FROM} hex HEX)
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${hex}")
string(REGEX REPLACE "(................................................................................)"
  "\\1\n" lines "${bytes}")
file(WRITE ${TO} "${lines}\n")
