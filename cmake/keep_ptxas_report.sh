#!/bin/sh
# Runs a CUDA compiler's command line. What ptxas says of each kernel's registers, stack
# and spills goes to OBJECT.ptxas.txt, all else where it belongs.
object=
previous=
for word in "$@"; do
  if [ "$previous" = -o ]; then object=$word; fi
  previous=$word
done
if [ -z "$object" ]; then exec "$@"; fi

said=$object.stderr
"$@" 2>"$said"
status=$?
about='^ptxas info|bytes stack frame|Function properties|Overriding'
grep -E "$about" "$said" >"$object.ptxas.txt"
grep -vE "$about" "$said" >&2
rm -f "$said"
exit $status
