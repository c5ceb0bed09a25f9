/* Headers from all peers through one receive, and the tensors that lie in their senders' heaps:
 * csrc/c10d/messages/header_channel.{h,cc} and placed_message.{h,cc}.
 *
 * Checked in every order of the steps, for every choice of calls that time out or are cancelled, and
 * of copies that their sender drops before they are taken:
 *   - no copy is read before it is written, or written while its receiver reads it;
 *   - no flag is set in memory that another message lies in;
 *   - no header is lost, overwritten in the buffer, or read out of its sender's order;
 *   - the receiver gets every header, though it waits for nothing else.
 *
 * SENDERS, MESSAGES: how many, and of each sender. SLOTS: of each sender's heap. CRASH: a sender's
 * process may end before any step; its heap stays mapped, and what it has announced still counts.
 * BREAK: leaves out one thing that the protocol needs; a check must then find an error.
 */
#ifndef SENDERS
#define SENDERS 1
#endif
#ifndef MESSAGES
#define MESSAGES 3
#endif
#ifndef SLOTS
#define SLOTS 2
#endif
#ifndef BREAK
#define BREAK 0
#endif
#define ANNOUNCE_BEFORE_COPY 1
#define FLAG_BEFORE_COPY 2
#define NO_RETIRE 3
#define POST_BEFORE_READ 4
#define FORGET_CLAIMED 5

#define NONE SLOTS                 /* the tensor follows its header */
#define AT(sender, slot) ((sender) * SLOTS + (slot))

mtype = { unposted, waits, claimed, arrived };
mtype = { unused, placed, retired };

/* Announcements, in the order in which a sender makes them */
chan outbox0 = [MESSAGES] of { byte, byte };
chan outbox1 = [MESSAGES] of { byte, byte };
bit dead[SENDERS];
bool fault = false;

/* The senders' heaps */
mtype memory[SENDERS * SLOTS] = unused;  /* as the sender's allocator has it */
byte whose[SENDERS * SLOTS];             /* the message whose bytes lie there; 0: half written */
bit taken[SENDERS * SLOTS];              /* the flag */
bit reads[SENDERS * SLOTS];              /* the receiver, now; for the checks alone */

/* The one receive, and its buffer */
mtype receive = unposted;
byte source;
byte number;
byte slot_of;

inline announce(message, slot) {
  if
  :: me == 0 -> outbox0!message, slot
  :: else -> outbox1!message, slot
  fi
}

/* PlacedMessage::copy_of */
inline copy(message, slot) {
  atomic { assert(!reads[AT(me, slot)]); whose[AT(me, slot)] = 0 };
  atomic { whose[AT(me, slot)] = message; taken[AT(me, slot)] = 0 }
}

/* ~PlacedMessage of a copy that is taken, or of any copy */
inline drop_some() {
  slot = 0;
  do
  :: slot < SLOTS ->
    if
    :: atomic { memory[AT(me, slot)] == placed && taken[AT(me, slot)] -> memory[AT(me, slot)] = unused }
    :: atomic { memory[AT(me, slot)] == placed && !taken[AT(me, slot)] -> skip };
       /* The receiver may take it here. */
#if BREAK == NO_RETIRE
       memory[AT(me, slot)] = unused
#else
       memory[AT(me, slot)] = retired
#endif
    :: skip
    fi;
    slot++
  :: else -> break
  od
}

proctype Sender(byte me) {
  byte message = 1;
  byte slot;
  {
    do
    :: message <= MESSAGES ->
      drop_some();
      slot = 0;
      do
      :: atomic { slot < SLOTS && memory[AT(me, slot)] != unused -> slot++ }
      :: atomic { slot < SLOTS && memory[AT(me, slot)] == unused -> memory[AT(me, slot)] = placed; break }
      :: atomic { slot == SLOTS -> break }
      od;
      if
      :: slot == NONE -> announce(message, NONE)
      :: else ->
#if BREAK == ANNOUNCE_BEFORE_COPY
        announce(message, slot);
        copy(message, slot)
#else
        copy(message, slot);
        announce(message, slot)
#endif
      fi;
      message++
    :: else -> break
    od;
    drop_some()
  } unless {
    dead[me]
  }
}

/* The receiver's threads that match announcements with the posted receive (comm/p2p) */
active proctype Engine() {
  byte message, slot;
end:
  do
  :: atomic { receive == waits && nempty(outbox0) -> outbox0?message, slot; receive = claimed };
    atomic { source = 0; number = message; slot_of = slot };
    if
    :: atomic { receive == claimed -> receive = arrived }
    :: else /* forgotten meanwhile */
    fi
  :: atomic { receive == waits && nempty(outbox1) -> outbox1?message, slot; receive = claimed };
    atomic { source = 1; number = message; slot_of = slot };
    if
    :: atomic { receive == claimed -> receive = arrived }
    :: else
    fi
  od
}

#if SENDERS == 2
#define ANY_LOST (dead[0] || dead[1])
#else
#define ANY_LOST (dead[0])
#endif

/* PlacedMessage::take */
inline take() {
#if BREAK == FLAG_BEFORE_COPY
  taken[AT(from, slot)] = 1;
#endif
  atomic { assert(whose[AT(from, slot)] == message); reads[AT(from, slot)] = 1 };
  atomic { assert(whose[AT(from, slot)] == message); reads[AT(from, slot)] = 0 };
#if BREAK != FLAG_BEFORE_COPY
  atomic { assert(whose[AT(from, slot)] == message); taken[AT(from, slot)] = 1 }
#endif
}

active proctype Receiver() {
  byte got[SENDERS];
  byte left = SENDERS * MESSAGES;
  byte from, message, slot;
  do
  :: left == 0 -> break
  :: else ->
    /* HeaderChannel::next */
    if
    :: receive == unposted -> receive = waits
    :: else
    fi;
    if
    :: atomic { receive == arrived -> skip };
#if BREAK == POST_BEFORE_READ
      receive = waits;
#endif
      from = source;
      message = number;
      slot = slot_of;
#if BREAK != POST_BEFORE_READ
      receive = unposted;
#endif
      atomic { got[from]++; assert(message == got[from]) };
      left--;
      if
      :: slot != NONE -> take()
      :: else
      fi
    /* The time is over. Now and then the receive is cancelled. */
    :: atomic { receive == waits -> skip };
      if
#if BREAK == FORGET_CLAIMED
      :: receive = unposted
#else
      :: atomic { receive == waits -> receive = unposted }
      :: atomic { receive != waits -> skip }
#endif
      :: skip
      fi
    /* A rank is lost, and nothing that it has announced is left. */
    :: atomic { receive == waits && ANY_LOST && empty(outbox0) && empty(outbox1) -> goto lost }
    fi
  od;
  goto ended;
lost:
  assert(fault);
ended:
  skip
}

#ifdef CRASH
proctype Crash() {
  byte victim;
  select(victim : 0 .. (SENDERS - 1));
  atomic { fault = true; dead[victim] = 1 }
}
#endif

init {
  byte i;
  atomic {
    for (i : 0 .. (SENDERS - 1)) { run Sender(i) };
    i = 0;
#ifdef CRASH
    run Crash()
#endif
  }
}
