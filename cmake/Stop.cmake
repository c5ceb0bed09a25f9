# Ends the configuration with one line for people; the leading space keeps it unwrapped.
function(dreamcomm_stop text)
  message(FATAL_ERROR " ${text}")
endfunction()
