/* The rounds by which collectives exchange bytes: csrc/transport/rounds.{h,cc}, the doorbell
 * of csrc/core/flag.h, the waits of csrc/transport/wait.h and csrc/comm/wait_watchdog.cc.
 *
 * Checked in every order of every rank's steps, for every choice of who reads whom in each
 * round:
 *   - no page is read before it is written, or written while a peer reads it;
 *   - no wake-up is lost: when a rank has published and rung, nobody sleeps that waited for
 *     nothing else;
 *   - no rank waits for ever, though a sleep ends by itself only where a rank is gone;
 *   - without a fault no call fails, and no rank is called gone that had done its part.
 *
 * RANKS, ROUNDS: how many. SURE_BELL: a rank sleeps until what it waits for has come or cannot
 * come any more, instead of by the steps of the doorbell, which two ranks show; for three
 * there would be too many. CRASH: one rank's process may end before any step. ABORT: one
 * rank's group may be given up by another thread before any step.
 * BREAK: leaves out one thing that the protocol needs; a check must then find an error.
 *
 * Steps are as fine as the accesses to shared memory, which are sequentially consistent for
 * flags and doorbells. What a rank does alone between two of them is one step with the first.
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef ROUNDS
#define ROUNDS 3
#endif
#ifndef BREAK
#define BREAK 0
#endif
#define ONE_PAGE 1
#define NO_WAIT_FOR_READERS 2
#define PUBLISH_BEFORE_WRITE 3
#define RING_BEFORE_PUBLISH 4
#define LOOK_BEFORE_APPROACH 5
#define NO_SECOND_LOOK 6

#define NOBODY RANKS

mtype = { everyone, to_root, from_root, around };
mtype = { member, left, failed };

mtype pattern[ROUNDS + 1];     /* who reads whom in a round; of round 0 nobody has read */
byte round[RANKS];             /* Header::round */
mtype status[RANKS] = member;  /* Header::status */
byte rings[RANKS];             /* Doorbell */
bit sleepers[RANKS];
byte seen[RANKS];              /* of rings, before the sleep */
byte sleeps[RANKS];            /* until this round; for the checks alone */
bit dead[RANKS];               /* as the kernel tells by the closed socket */
bit aborted[RANKS];           /* RankState::failed_ */
bool fault = false;

/* What the rank does with pages now; 0: nothing. For the checks alone. */
byte writes[RANKS];            /* its own page of this round */
byte written[RANKS];           /* the last round whose page it has written */
byte reads[RANKS];             /* its peers' pages of this round */

#if BREAK == ONE_PAGE
#define PAGE(r) 0
#else
#define PAGE(r) ((r) % 2)
#endif

#define READS(how, me, peer) \
  ((me) != (peer) && ((how) == everyone || ((how) == to_root && (me) == 0) || \
                      ((how) == from_root && (peer) == 0) || \
                      ((how) == around && (peer) == ((me) + RANKS - 1) % RANKS)))

#if BREAK == NO_WAIT_FOR_READERS
#define WAITS_FOR(me, peer, r) READS(pattern[r], me, peer)
#else
#define WAITS_FOR(me, peer, r) \
  (READS(pattern[r], me, peer) || (r > 1 && READS(pattern[r - 1], peer, me)))
#endif
#define BEHIND(me, peer, r) (WAITS_FOR(me, peer, r) && round[peer] < r)

#define GONE(rank) (dead[rank] || status[rank] != member)

#define READ_BY(peer, me, r) \
  (!dead[peer] && reads[peer] != 0 && PAGE(reads[peer]) == PAGE(r) && \
   READS(pattern[reads[peer]], peer, me))
#define IS_WHOLE(peer, r) \
  (written[peer] >= r && !(written[peer] > r && PAGE(written[peer]) == PAGE(r)) && \
   !(writes[peer] != 0 && PAGE(writes[peer]) == PAGE(r)))
#if RANKS == 2
#define READ_BY_ANY(me, r) (READ_BY(0, me, r) || READ_BY(1, me, r))
#define ALL_WHOLE(me, r) \
  ((!READS(pattern[r], me, 0) || IS_WHOLE(0, r)) && (!READS(pattern[r], me, 1) || IS_WHOLE(1, r)))
#define ANY_GONE (GONE(0) || GONE(1))
#else
#define READ_BY_ANY(me, r) (READ_BY(0, me, r) || READ_BY(1, me, r) || READ_BY(2, me, r))
#define ALL_WHOLE(me, r) \
  ((!READS(pattern[r], me, 0) || IS_WHOLE(0, r)) && (!READS(pattern[r], me, 1) || IS_WHOLE(1, r)) && \
   (!READS(pattern[r], me, 2) || IS_WHOLE(2, r)))
#define ANY_GONE (GONE(0) || GONE(1) || GONE(2))
#endif

/* Doorbell::ring: looks for a sleeper, and if there is one wakes who sleeps at the number
 * before. */
inline ring(rank) {
#ifdef SURE_BELL
  skip
#else
  if
  :: atomic { sleepers[rank] == 0 -> skip }
  :: atomic { sleepers[rank] == 1 -> skip }; rings[rank]++
  fi
#endif
}

inline ring_peers() {
#ifdef SURE_BELL
  skip
#else
  if
  :: me != 0 -> ring(0)
  :: else
  fi;
  if
  :: me != 1 -> ring(1)
  :: else
  fi
#endif
}

#define SLEEPS_FOR(peer, me) \
  (!dead[peer] && sleeps[peer] != 0 && rings[peer] == seen[peer] && \
   WAITS_FOR(peer, me, sleeps[peer]) && round[me] >= sleeps[peer])

inline publish() {
#if BREAK == RING_BEFORE_PUBLISH
  ring_peers();
  round[me] = r;
#else
  round[me] = r;
  ring_peers();
#endif
#if RANKS == 2
  assert(!SLEEPS_FOR(1 - me, me))
#endif
}

/* blocker: the first rank waited for that lacks the round. One flag is read at a time. */
inline look_at_flags() {
  blocker = 0;
  do
  :: atomic { blocker < RANKS && BEHIND(me, blocker, r) -> break }
  :: atomic { blocker < RANKS && !BEHIND(me, blocker, r) -> blocker++;
              do :: blocker < RANKS && !WAITS_FOR(me, blocker, r) -> blocker++ :: else -> break od }
  :: atomic { blocker == RANKS -> break }
  od
}

/* A sleep ends by the doorbell. Its slice, which is how ranks that are gone are noticed, only
 * counts where there are such: it must not be needed else. */
inline sleep() {
  atomic { sleeps[me] = r };
  atomic { rings[me] != seen[me] || ANY_GONE -> seen[me] = 0; sleeps[me] = 0 }
}

/* WaitWatchdog::look */
inline look() {
  if
  :: atomic { aborted[me] -> goto ended }
  :: atomic { !aborted[me] -> skip }
  fi;
  if
  :: atomic { !GONE(blocker) -> missed = NOBODY }
#if BREAK == NO_SECOND_LOOK
  :: atomic { GONE(blocker) -> goto lost }
#else
  :: atomic { GONE(blocker) && missed != blocker -> missed = blocker }
  :: atomic { GONE(blocker) && missed == blocker -> goto lost }
#endif
  fi
}

inline wait() {
  look_at_flags();  /* the spins and yields */
#ifdef SURE_BELL
  do
  :: atomic { blocker == NOBODY -> break }
  :: atomic { blocker != NOBODY && (round[blocker] >= r || GONE(blocker) || aborted[me]) -> skip };
    look_at_flags();
    if
    :: atomic { blocker != NOBODY -> skip }; look()
    :: else
    fi
  od;
#else
  do
  :: atomic { blocker == NOBODY -> break }
  :: else ->
#if BREAK == LOOK_BEFORE_APPROACH
    look_at_flags();
    sleepers[me] = 1;
    seen[me] = rings[me];
#else
    sleepers[me] = 1;
    seen[me] = rings[me];
    look_at_flags();
#endif
    if
    :: atomic { blocker != NOBODY -> skip }; sleep()
    :: else -> seen[me] = 0
    fi;
    sleepers[me] = 0;
    if
    :: atomic { blocker != NOBODY -> skip }; look_at_flags();
      if
      :: atomic { blocker != NOBODY -> skip }; look()
      :: else
      fi
    :: else
    fi
  od;
#endif
  missed = NOBODY
}

inline begin_writing() { atomic { assert(!READ_BY_ANY(me, r)); writes[me] = r } }
inline end_writing() { atomic { written[me] = r; writes[me] = 0 } }

proctype Rank(byte me) {
  byte r = 1;
  byte blocker = NOBODY;
  byte missed = NOBODY;
  {
    begin_writing();
    do
    ::
#if BREAK == PUBLISH_BEFORE_WRITE
      publish();
      end_writing();
#else
      end_writing();
      publish();
#endif
      wait();
      atomic { assert(ALL_WHOLE(me, r)); reads[me] = r };
      if
      :: r == ROUNDS -> break
      :: else -> r++; begin_writing()  /* its own page, while it still reads */
      fi;
      reads[me] = 0
    od;
    reads[me] = 0;
    atomic {
      if
      :: status[me] == member -> status[me] = left
      :: else
      fi
    };
    ring_peers();
    goto gone;
lost:
    /* One that has aborted the group may yet go on for a step or two. */
    assert(fault && (status[blocker] == failed || round[blocker] < r));
ended:
    assert(fault);
    status[me] = failed;
    ring_peers()
gone:
    skip
  } unless {
    dead[me]
  }
}

#ifdef CRASH
proctype Crash() {
  byte victim;
  select(victim : 0 .. (RANKS - 1));
  atomic { fault = true; dead[victim] = 1 }
}
#endif

#ifdef ABORT
/* RankState::fail by another thread of a rank */
proctype Abort() {
  byte me;
  select(me : 0 .. (RANKS - 1));
  atomic {
    fault = true;
    if
    :: status[me] == member -> status[me] = failed; aborted[me] = 1
    :: else
    fi
  };
  ring_peers();
  ring(me)
}
#endif

init {
  byte i;
  atomic {
    for (i : 1 .. ROUNDS) {
      if
      :: pattern[i] = everyone
      :: pattern[i] = to_root
      :: pattern[i] = from_root
#if RANKS > 2
      :: pattern[i] = around
#endif
      fi
    };
    for (i : 0 .. (RANKS - 1)) { run Rank(i) };
    i = 0;
#ifdef CRASH
    run Crash();
#endif
#ifdef ABORT
    run Abort()
#endif
  }
}
