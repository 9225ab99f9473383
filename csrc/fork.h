// What threads share, across fork(): the child has the forking thread alone, so what another one holds locked at that
// moment would stay locked there for ever.
#pragma once
#ifdef __linux__
#include <pthread.h>
#endif

namespace torch_blocked {

// From now on the forking thread holds Owner::instance(), which has lock() and unlock(), while the process forks. Where
// a thread locks two owners, call this last for the one that it locks first: handlers run in the reverse order.
template <class Owner>
void hold_in_forks() {
#ifdef __linux__
  const auto unlock = [] { Owner::instance().unlock(); };
  pthread_atfork([] { Owner::instance().lock(); }, unlock, unlock);
#endif
}

}  // namespace torch_blocked
