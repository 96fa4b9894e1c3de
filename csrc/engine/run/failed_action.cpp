#include "engine/run/failed_action.h"

#include "core/check.h"
#include "engine/channels/channel.h"
#include "transport/peer_error.h"

#include <exception>
#include <stdexcept>
#include <string>
#include <typeinfo>

namespace pd2 {

Failure describe_failure(const ExecutorSetup& setup, const Doing& doing, int rank) {
  const Schedule& schedule = setup.schedule;
  Failure failure = setup.describe(std::current_exception(), rank);
  failure.stage = doing.stage % schedule.depth();
  failure.replica = setup.replica;
  if (!doing.evaluating) {
    failure.batch = doing.run;
  }
  failure.microbatch = schedule.number_in_batch(doing.stage, doing.microbatch);
  failure.action = name_of(doing.kind);
  failure.text = stage_name(*failure.stage, setup.replica, setup.num_replicas);
  if (schedule.num_pipelines > 1) {
    failure.text += detail::concat(" in pipeline ", schedule.pipeline(doing.stage));
  }
  failure.text += doing.evaluating ? ", evaluation" : detail::concat(", batch ", doing.run);
  failure.text += detail::concat(", microbatch ", *failure.microbatch, ", ", *failure.action, ": ",
                                 failure.cause);
  return failure;
}

bool is_of_users_code() {
  try {
    throw;
  } catch (const ChannelAborted&) {
    return false;
  } catch (const PeerError&) {
    return false;
  } catch (const std::logic_error& error) {
    return typeid(error) != typeid(std::logic_error);  // PD2_ASSERT's
  } catch (...) {
    return true;
  }
}

}  // namespace pd2
